//! One module a command.

pub mod bench;
pub mod doctor;
pub mod plan;
pub mod run;

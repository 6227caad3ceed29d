//! One module a command.

pub mod doctor;

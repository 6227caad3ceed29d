//! Attention of one new token a sequence over pages, and the coding of tokens that leave the recent window.

pub mod decode;
pub mod demote;

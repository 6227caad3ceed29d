//! Whole models on disk: good ones of every family load, and each way a file can be wrong gives one
//! clear error.

mod corrupted;
mod experts;
mod families;
mod fp8;
mod models;

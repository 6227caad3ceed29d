//! Whole models through the engine: goldens of Hugging Face transformers, and the promise that nothing but the
//! sequence itself decides its answer.

mod client;
mod constraints;
mod delta;
mod delta_store;
mod families;
mod faults;
mod fp8_weights;
mod goldens;
mod latent;
mod logs;
mod post;
mod requests;
mod row_cap;
mod same_answers;
mod scheduler;
mod serving;
mod sliding;
mod store;
mod support;
mod views;

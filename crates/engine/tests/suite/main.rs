//! Whole models through the engine: goldens of Hugging Face transformers, and the promise that nothing but the
//! sequence itself decides its answer.

mod goldens;
mod same_answers;
mod support;

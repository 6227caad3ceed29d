//! `models/oscar-15m`, compiled into the binary, so that every command works before anything was
//! downloaded.
//!
//! **Invariant:** bytes and names only; whoever parses them lives elsewhere.

/// Name shown to users and reported by the API.
pub const NAME: &str = "oscar-15m";

macro_rules! model_files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../models/oscar-15m/", $name)).as_slice())),*]
    };
}

/// The files of the Hugging Face directory `models/oscar-15m`.
pub static FILES: &[(&str, &[u8])] = model_files![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "rotations.safetensors",
    "tokenizer.json",
    "tokenizer_config.json"
];

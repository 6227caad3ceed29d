//! Families with sliding windows as a user meets them: a folder that just works, plans and refusals
//! that say what is stored and what is not computed.

use crate::support::{fail, json_lines, oscar, succeed};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family};
use std::path::Path;

/// A random model with the shipped tokenizer.
pub fn folder(family: Family) -> tempfile::TempDir {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let dir = tempfile::tempdir().unwrap();
    let config = DecoderConfig { vocab_size: 6144, max_position_embeddings: 2048, ..tiny_config(family) };
    write_random_model(dir.path(), &config, WriteOptions::default(), 5).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(shipped.join(file), dir.path().join(file)).unwrap();
    }
    dir
}

#[test]
fn a_folder_answers_is_planned_calibrated_and_refuses_eviction() {
    for family in [Family::Gemma3, Family::GptOss] {
        let dir = folder(family);
        let model = dir.path().to_str().unwrap();
        let on = ["--model", model, "--device", "cpu"];
        for kv in ["bf16", "oscar2"] {
            let run = ["run", "--kv", kv, "--prompt", "Hello", "--max-tokens", "3", "--json"];
            let row = &json_lines(&[&run[..], &on].concat())[0];
            assert!(row["text"].is_string(), "{row}");
        }
        let plan = ["plan", "--memory", "1G", "--context", "1024", "--kv", "bf16"];
        let out = oscar(&[&plan[..], &on].concat());
        let notes = String::from_utf8_lossy(&out.stderr);
        let says = "1 of 2 layers see the last 24 tokens only; they keep no more than that, unquantized";
        assert!(out.status.success() && notes.contains(says), "{notes}");
        // One layer grows; the other keeps a window that touches two pages at most.
        let plan = ["plan", "--memory", "1G", "--context", "64,1024", "--kv", "bf16,oscar2", "--json"];
        let rows = json_lines(&[&plan[..], &on].concat());
        let bytes = |row: usize| rows[row]["sequence_bytes"].as_u64().unwrap();
        let block = bytes(0) / 2;
        assert_eq!(bytes(1), 16 * block + 2 * block, "16 blocks of one layer, 2 of the other");
        // Sink, five pages of recent tokens, two of the window, and the codes of one layer.
        assert!(bytes(3) < 11 * block, "{} bytes quantized, {block} a block", bytes(3));

        let file = dir.path().join("rotations.safetensors");
        let file = file.to_str().unwrap();
        succeed(&[&["calibrate", "--tokens", "512", "--out", file, "--json"], &on[..]].concat());
        let run = ["run", "--rotations", file, "--prompt", "Hello", "--max-tokens", "3", "--json"];
        json_lines(&[&run[..], &on].concat());

        let widths = ["calibrate", "--tokens", "512", "--bits", "2.25", "--out", file];
        let (_, message) = fail(&[&widths[..], &on].concat());
        assert!(message.contains("not searched for models with sliding layers"), "{message}");

        let serve = ["serve", "--kv", "oscar2", "--kv-budget", "512", "--port", "0"];
        let (_, message) = fail(&[&serve[..], &on].concat());
        assert!(message.contains("sliding windows or attention sinks"), "{message}");
    }
}

//! Families with sliding windows or latent attention as a user meets them: a folder that just works,
//! plans and refusals that say what is stored and what is not computed.

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

#[test]
fn latent_attention_answers_in_bf16_and_refuses_the_rest_by_name() {
    for family in [Family::DeepseekV3, Family::Glm4MoeLite] {
        let dir = folder(family);
        let model = dir.path().to_str().unwrap();
        let on = ["--model", model, "--device", "cpu"];
        let run = ["run", "--prompt", "Hello", "--max-tokens", "3", "--json"];
        let out = oscar(&[&run[..], &on].concat());
        let (answer, notes) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(answer.contains(r#""kv":"bf16""#), "{answer}{notes}");
        for says in ["latent attention (MLA): its cache is bf16", "one latent row of 64"] {
            assert!(notes.contains(says), "{notes}");
        }
        // Two layers of one row of 64 channels in BF16.
        let plan = ["plan", "--memory", "1G", "--context", "1024", "--json"];
        let rows = json_lines(&[&plan[..], &on].concat());
        assert_eq!((rows.len(), rows[0]["kv"].as_str()), (1, Some("bf16")));
        assert_eq!(rows[0]["sequence_bytes"].as_u64(), Some(1024 * 2 * 64 * 2));

        let file = dir.path().join("rotations.safetensors");
        let file = file.to_str().unwrap();
        let serve = ["serve", "--port", "0"];
        for (flags, says) in [
            (&["run", "--prompt", "Hello", "--kv", "oscar"][..], "--kv oscar is not offered for latent"),
            (
                &["plan", "--memory", "1G", "--context", "512", "--kv", "int8"],
                "--kv int8 is not offered for latent",
            ),
            (&[&serve[..], &["--kv", "oscar2"]].concat(), "--kv oscar2 is not offered for latent"),
            (&[&serve[..], &["--calibrate", "widths"]].concat(), "latent attention (MLA) is not calibrated"),
            (&[&serve[..], &["--kv-budget", "512"]].concat(), "latent attention (MLA)"),
            (&[&serve[..], &["--tensor-parallel", "2"]].concat(), "latent attention (MLA) is not split"),
            (&["calibrate", "--tokens", "512", "--out", file], "latent attention (MLA) is not calibrated"),
        ] {
            let (_, message) = fail(&[flags, &on].concat());
            assert!(message.contains(says), "{flags:?}: {message}");
        }
        let plan = ["plan", "--memory", "1G", "--context", "512", "--model", model, "--device", "cuda"];
        let (_, message) = fail(&plan);
        assert!(message.contains("latent attention (MLA), which GPUs do not compute"), "{message}");
    }
}

#[test]
fn shapes_of_latent_models_are_planned() {
    let plan = ["plan", "--shape", "glm-4.7-flash", "--memory", "80G", "--device", "cpu", "--json"];
    let rows = json_lines(&[&plan[..], &["--context", "131072"]].concat());
    assert_eq!((rows.len(), rows[0]["sequence_bytes"].as_u64()), (1, Some(131_072 * 54_144)));
}

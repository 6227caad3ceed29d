//! FP8 weights as a user meets them: a checkpoint that just works, plans that count it, weights quantized while loading.

use crate::support::{fail, json_lines, oscar};
use oscar_models::tiny::fp8::{Twin, write_twin};
use serde_json::Value;
use std::path::Path;

/// The shipped model with FP8 projections, as a folder.
fn checkpoint() -> tempfile::TempDir {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let dir = tempfile::tempdir().unwrap();
    write_twin(&shipped, dir.path(), Twin::Blocks).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(shipped.join(file), dir.path().join(file)).unwrap();
    }
    dir
}

#[test]
fn an_fp8_checkpoint_answers_and_says_what_became_of_its_weights() {
    let dir = checkpoint();
    let model = dir.path().to_str().unwrap();
    for (kv, says) in [
        ("bf16", "FP8 weights, the checkpoint's: qkv, output, gate_up, down, expanded on this device"),
        (
            "oscar2",
            "gate_up, down, expanded on this device; expanded: qkv (the value rotation is folded in), output (",
        ),
    ] {
        let args = [
            "run",
            "--model",
            model,
            "--device",
            "cpu",
            "--kv",
            kv,
            "--prompt",
            "Hello",
            "--max-tokens",
            "3",
        ];
        let out = oscar(&args);
        let log = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && log.contains(says), "{log}");
    }
}

#[test]
fn a_plan_counts_fp8_where_it_stays_fp8() {
    let dir = checkpoint();
    let model = dir.path().to_str().unwrap();
    let plan = |more: &[&str]| -> Vec<Value> {
        let args = [
            "plan",
            "--model",
            model,
            "--memory",
            "1G",
            "--context",
            "4096",
            "--kv",
            "bf16,oscar2",
            "--json",
        ];
        json_lines(&[&args[..], more].concat())
    };
    let weights = |rows: &[Value]| -> Vec<u64> {
        rows.iter().map(|row| row["weight_bytes"].as_u64().unwrap()).collect()
    };
    let rows = plan(&["--device", "cuda"]);
    let (cpu, gpu) = (weights(&plan(&["--device", "cpu"])), weights(&rows));
    assert_eq!(cpu[0], cpu[1]);
    // A byte less for each weight of six layers, four more for each block of 128 × 128; attention's are rotated.
    let mlp = 6 * (3 * 384 * 1024 - 4 * (3 * 3 * 8));
    let attention = 6 * (384 * (1024 + 512 + 1024) - 4 * (3 * (8 + 4 + 8)));
    assert_eq!((gpu[0], gpu[1]), (cpu[0] - mlp - attention, cpu[0] - mlp));
    assert_eq!(weights(&plan(&["--device", "cuda", "--weights", "bf16"])), cpu);
    // Memory for the weights of one cache and not of the other: planned, and said.
    let step = rows[0]["step_bytes"].as_u64().unwrap();
    let memory = (step + (gpu[0] + gpu[1]).div_ceil(2)).to_string();
    let two = [
        "plan",
        "--model",
        model,
        "--device",
        "cuda",
        "--context",
        "64",
        "--kv",
        "oscar2,bf16",
        "--memory",
        &memory,
    ];
    let out = oscar(&two);
    let (text, note) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("bf16") && !text.contains("oscar2"), "{text}");
    assert!(note.contains("with oscar2 does not fit"), "{note}");
    let none = oscar(&[&two[..9], &["--memory", "1M"]].concat());
    assert!(!none.status.success() && String::from_utf8_lossy(&none.stderr).contains("does not fit"));
}

#[test]
fn weights_can_be_quantized_while_loading() {
    let args = [
        "run",
        "--device",
        "cpu",
        "--weights",
        "fp8",
        "--prompt",
        "Who are you?",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    ];
    let out = oscar(&args);
    assert!(String::from_utf8_lossy(&out.stderr).contains("quantized now"));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("small language model"), "{text}");
    let row = &json_lines(&[
        "bench",
        "decode",
        "--device",
        "cpu",
        "--weights",
        "fp8",
        "--context",
        "64",
        "--repetitions",
        "2",
        "--kv",
        "bf16",
        "--json",
    ])[0];
    assert_eq!(row["weights"], "fp8");
    assert!(row["weight_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn bad_fp8_is_refused_by_name() {
    let (status, message) = fail(&["run", "--weights", "int3", "--prompt", "x"]);
    assert!(status == 2 && message.contains("fp8"), "{message}");
    let dir = checkpoint();
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap().replace("e4m3", "e5m2");
    std::fs::write(&path, config).unwrap();
    let (status, message) = fail(&["run", "--model", dir.path().to_str().unwrap(), "--prompt", "x"]);
    assert!(status == 1 && message.contains("only \"e4m3\""), "{message}");
}

use crate::support::{json_lines, succeed};

#[test]
fn doctor_shows_machine_model_and_formats() {
    let text = succeed(&["doctor"]);
    for needle in ["kernels", "oscar-15m", "weights intact", "oscar2-official", "2.25"] {
        assert!(text.contains(needle), "{needle} is missing in:\n{text}");
    }
    let json = &json_lines(&["doctor", "--json"])[0];
    assert_eq!(json["parameters"], 15_341_952);
}

#[test]
fn run_answers_on_a_two_bit_cache() {
    let json = &json_lines(&["run", "--prompt", "Who are you?", "--json"])[0];
    assert_eq!(
        json["text"],
        "I am a small language model with fifteen million weights, trained to read long texts and remember what they say."
    );
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(json["kv"], "oscar2");
    assert!(json["cache_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn run_stops_at_a_stop_string_and_at_the_token_limit() {
    let json = &json_lines(&["run", "--prompt", "Who are you?", "--stop", "fifteen", "--json"])[0];
    assert_eq!(json["text"], "I am a small language model with ");
    let json = &json_lines(&["run", "--prompt", "Who are you?", "--max-tokens", "3", "--json"])[0];
    assert_eq!(
        (json["finish_reason"].as_str().unwrap(), json["generated_tokens"].as_u64().unwrap()),
        ("length", 3)
    );
}

#[test]
fn run_reads_chat_files_and_raw_prompts_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let chat = dir.path().join("chat.json");
    std::fs::write(&chat, r#"{"messages": [{"role": "user", "content": "My friend Ada lives in Oslo."},
        {"role": "assistant", "content": "Noted: Ada, city, Oslo."}, {"role": "user", "content": "Where does Ada live?"}]}"#)
        .unwrap();
    let json = &json_lines(&["run", "--chat", chat.to_str().unwrap(), "--json"])[0];
    assert_eq!(json["text"], "Oslo");
    let raw = dir.path().join("raw.txt");
    std::fs::write(&raw, "<|im_start|>user\nWhere does Ada live?").unwrap();
    let prompt = format!("@{}", raw.display());
    let json = &json_lines(&["run", "--raw", "--prompt", &prompt, "--max-tokens", "1", "--json"])[0];
    assert_eq!(json["generated_tokens"], 1);
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let args = [
        "run",
        "--prompt",
        "Continue this text: The sea was calm.",
        "--temperature",
        "1",
        "--seed",
        "7",
        "--max-tokens",
        "24",
        "--json",
    ];
    let (a, b) = (json_lines(&args)[0]["text"].clone(), json_lines(&args)[0]["text"].clone());
    assert_eq!(a, b);
}

#[test]
fn plan_counts_exactly() {
    let rows = json_lines(&["plan", "--memory", "1G", "--kv", "bf16,oscar2", "--context", "16384", "--json"]);
    let bytes: Vec<f64> = rows.iter().map(|r| r["sequence_bytes"].as_f64().unwrap()).collect();
    assert_eq!(bytes[0], 16384.0 * 6144.0);
    assert!(bytes[0] / bytes[1] > 6.0, "{bytes:?}");
    let free = (1u64 << 30) - rows[0]["weight_bytes"].as_u64().unwrap();
    assert_eq!(rows[0]["batch"].as_u64().unwrap(), free / bytes[0] as u64);
}

#[test]
fn bench_rows_carry_the_promised_fields() {
    let runs: [&[&str]; 3] = [
        &[
            "bench",
            "attention",
            "--heads",
            "4/1",
            "--head-dim",
            "64",
            "--context",
            "512",
            "--repetitions",
            "2",
            "--json",
        ],
        &["bench", "decode", "--context", "400", "--repetitions", "2", "--json"],
        &["bench", "prefill", "--context", "400", "--json"],
    ];
    for args in runs {
        let rows = json_lines(args);
        assert_eq!(rows.len(), 2, "bf16 and oscar2");
        for row in rows {
            for field in [
                "kv",
                "device",
                "context",
                "batch",
                "us",
                "tokens_per_s",
                "gbps",
                "ceiling_gbps",
                "cache_bytes",
            ] {
                assert!(!row[field].is_null(), "{field} is missing in {row}");
            }
        }
    }
    let rows = json_lines(&[
        "bench",
        "gemm",
        "--rows",
        "1",
        "--outputs",
        "256",
        "--inputs",
        "256",
        "--repetitions",
        "2",
        "--json",
    ]);
    assert!(rows.iter().all(|r| r["gflops"].as_f64().unwrap() > 0.0));
}

use crate::support::{fail, json_lines, succeed};

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
    assert_eq!(json["kv"], "oscar");
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
fn run_shows_the_model_the_tools_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = |text: &str| {
        let path = dir.path().join("tools.json");
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let ask = ["run", "--prompt", "Who are you?", "--max-tokens", "2", "--json"];
    let plain = json_lines(&ask)[0].clone();
    let list = r#"[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]"#;
    for text in [list.to_owned(), format!("{{\"tools\": {list}}}")] {
        let tools = file(&text);
        let json = &json_lines(&[&ask[..], &["--tools", &tools]].concat())[0];
        assert!(json["prompt_tokens"].as_u64() > plain["prompt_tokens"].as_u64(), "{json}");
        assert_eq!(json["tool_calls"], serde_json::json!([]));
    }
    for (text, words) in [("[]", "expected a list of"), ("[5]", "expected a list of"), ("{", "is not JSON")] {
        let tools = file(text);
        let (_, error) = fail(&[&ask[..], &["--tools", &tools]].concat());
        assert!(error.contains("--tools") && error.contains(words), "{error}");
    }
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
    let taken = ["weight_bytes", "step_bytes", "prefill_bytes"].map(|part| rows[0][part].as_u64().unwrap());
    let free = (1u64 << 30) - taken.iter().sum::<u64>();
    assert_eq!(rows[0]["batch"].as_u64().unwrap(), free / bytes[0] as u64);
}

/// The chunk is the one that `serve` takes on that device, and its activations are counted.
#[test]
fn a_plan_counts_the_memory_of_its_steps() {
    let plan = |more: &[&str]| {
        let args = ["plan", "--memory", "4G", "--kv", "oscar2", "--context", "4096", "--json"];
        let rows = json_lines(&[&args[..], more].concat());
        (rows[0]["prefill_chunk"].as_u64().unwrap(), rows[0]["step_bytes"].as_u64().unwrap())
    };
    let (cpu, gpu) = (plan(&["--device", "cpu"]), plan(&["--device", "cuda"]));
    assert_eq!(cpu.0, 512);
    assert!((2048..=16384).contains(&gpu.0) && gpu.1 > cpu.1, "{cpu:?} {gpu:?}");
    let long = plan(&["--device", "cpu", "--prefill-chunk", "4096"]);
    assert!(long.1 > 4 * cpu.1, "{long:?} {cpu:?}");
    let (_, message) = fail(&["plan", "--memory", "500M", "--prefill-chunk", "1000000"]);
    assert!(message.contains("steps of up to") && message.contains("does not fit"), "{message}");
}

/// On a GPU, formats without kernels are kept decoded, and a plan counts that.
#[test]
fn a_plan_for_the_gpu_counts_what_the_gpu_keeps() {
    let plan = |device: &str| {
        let formats = "bf16,oscar2,kivi2";
        let args =
            ["plan", "--device", device, "--memory", "1G", "--kv", formats, "--context", "16384", "--json"];
        json_lines(&args).iter().map(|row| row["sequence_bytes"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let (cpu, gpu) = (plan("cpu"), plan("cuda"));
    assert_eq!((cpu[0], cpu[1]), (gpu[0], gpu[1]));
    assert!(4 * cpu[2] < cpu[0] && gpu[2] >= gpu[0], "{cpu:?} {gpu:?}");
}

#[test]
fn a_planned_budget_is_enough_and_a_page_less_is_not() {
    let row = &json_lines(&["plan", "--memory", "1G", "--kv", "oscar2", "--context", "600", "--json"])[0];
    let planned = row["sequence_bytes"].as_u64().unwrap() + row["prefill_bytes"].as_u64().unwrap();
    let prompt = "word ".repeat(590);
    let run = |bytes: u64| {
        let bytes = bytes.to_string();
        crate::support::oscar(&[
            "run",
            "--raw",
            "--prompt",
            &prompt,
            "--context",
            "600",
            "--max-tokens",
            "4",
            "--kv-memory",
            &bytes,
        ])
    };
    assert!(run(planned).status.success());
    assert!(!run(planned / 2).status.success());
}

#[test]
fn a_two_bit_cache_answers_from_coded_history() {
    // The needle lies in the middle of some 1400 tokens: read as code, far from both BF16 windows.
    let noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";
    let needle = "One of the special magic numbers for calm-anchor is: 4821973.\n";
    let prompt = format!(
        "Some special magic numbers are hidden in the text. Memorize them.\n{}{needle}{}What is the special magic number for \
         calm-anchor mentioned in the text?",
        noise.repeat(30),
        noise.repeat(30)
    );
    let json = &json_lines(&["run", "--prompt", &prompt, "--json"])[0];
    assert_eq!(json["text"], "4821973");
    assert!(json["prompt_tokens"].as_u64().unwrap() > 1000, "{json}");
    assert!(
        json["cache_bytes"].as_f64().unwrap() < 0.6 * json["bf16_cache_bytes"].as_f64().unwrap(),
        "{json}"
    );
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
        let formats = if args[1] == "attention" { 2 } else { 3 };
        assert_eq!(rows.len(), formats, "bf16 and oscar2, and oscar where there is a model");
        for row in rows {
            let read = ["us_mean", "floor_us", "gbps", "ceiling_gbps"];
            let worked = ["tflops", "products_tflops", "attention_tflops", "coding_share", "rest_share"];
            let own: &[&str] = if args[1] == "prefill" { &worked } else { &read };
            let all = ["kv", "device", "context", "batch", "us", "tokens_per_s", "cache_bytes"];
            for field in all.iter().chain(own) {
                assert!(!row[*field].is_null(), "{field} is missing in {row}");
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

/// Turns on views and on the whole history compute the same tokens; the view has fewer rows to read.
#[test]
fn bench_views_compares_turns_that_compute_the_same_tokens() {
    let rows = json_lines(&[
        "bench",
        "views",
        "--context",
        "1024",
        "--budget",
        "64",
        "--output-tokens",
        "2",
        "--repetitions",
        "2",
        "--json",
    ]);
    let policies: Vec<&str> = rows.iter().map(|r| r["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["keydiff-post", "kvzip", "episodes"]);
    for row in rows {
        assert_eq!((row["computed_whole"].as_u64(), row["computed_view"].as_u64()), (Some(32), Some(32)));
        assert!(row["rows"].as_u64().unwrap() < row["history"].as_u64().unwrap() / 2, "{row}");
        assert!(row["ttft_ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn bench_serve_gives_every_format_the_same_work_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("chart.svg");
    let common =
        ["bench", "serve", "--requests", "6", "--prompt-tokens", "96", "--output-tokens", "6", "--json"];
    let closed = ["--concurrency", "3", "--shared-prefix", "64", "--turns", "2", "--warm", "--svg"];
    let open = ["--rate", "200", "--kv", "oscar2"];
    let rows = json_lines(&[&common[..], &closed, &[svg.to_str().unwrap()]].concat());
    assert_eq!(rows.iter().map(|r| r["kv"].as_str().unwrap()).collect::<Vec<_>>(), ["bf16", "oscar"]);
    assert_eq!(rows[0]["kv_memory"], rows[1]["kv_memory"]);
    for row in &rows {
        assert_eq!((row["requests"].as_u64(), row["context"].as_u64()), (Some(12), Some(204)), "{row}");
        let (running, held) = (row["peak_running"].as_u64().unwrap(), row["peak_held"].as_u64().unwrap());
        assert!(1 <= held && held <= running && running <= 3, "{row}");
        // Every first prompt was read before and every second turn continues a first: a page of each is stored.
        assert!(row["prefix_hit_share"].as_f64().unwrap() > 0.4, "{row}");
        for field in ["requests_per_s", "tokens_per_s", "decode_tokens_per_s", "cache_bytes", "batch"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field} in {row}");
        }
        for latency in ["ttft_ms", "tpot_ms"] {
            let at = |p: &str| row[format!("{latency}_{p}")].as_f64().unwrap();
            assert!(0.0 < at("p50") && at("p50") <= at("p90") && at("p90") <= at("p99"), "{row}");
        }
    }
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));

    let rows = json_lines(&[&common[..], &open].concat());
    assert_eq!(
        (rows.len(), rows[0]["mode"].as_str(), rows[0]["requests"].as_u64()),
        (1, Some("open"), Some(6))
    );
    assert_eq!(rows[0]["prefix_hit_share"], 0.0, "cold prompts with nothing in common");

    let rows = json_lines(&[&common[..], &["--kv", "oscar2", "--http", "--concurrency", "6"]].concat());
    assert!(rows[0]["http_seconds"].as_f64().unwrap() > 0.0, "{}", rows[0]);
    assert!(rows[0]["http_overhead"].as_f64().unwrap() > -1.0, "{}", rows[0]);
}

use crate::support::fail;

/// Wrong usage exits with 2, a failure with 1; both name the value and the way out.
#[test]
fn errors_name_the_value_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().to_str().unwrap();
    let garbage = dir.path().join("garbage.json");
    std::fs::write(&garbage, "{ not json").unwrap();
    let garbage = garbage.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 32] = [
        (&["run", "--kv", "oscar9", "--prompt", "x"], 2, "oscar2-official"),
        (&["run", "--prompt", "x", "--chat", "y"], 2, "--chat"),
        (&["run", "--raw", "--prompt", ""], 1, "no tokens"),
        (&["run", "--prompt", "@/nonexistent/file"], 1, "/nonexistent/file"),
        (&["run", "--chat", garbage], 1, "not JSON"),
        (&["run", "--model", empty, "--prompt", "x"], 1, "config.json"),
        (&["run", "--model", "no/such-model", "--prompt", "x"], 1, "no/such-model"),
        (&["run", "--prompt", "x", "--temperature", "-1"], 1, "temperature is -1"),
        (&["run", "--prompt", "x", "--top-p", "0"], 1, "top_p"),
        (&["run", "--prompt", "x", "--sink", "10"], 1, "multiple of 16"),
        (&["run", "--prompt", "x", "--rotations", garbage], 1, "rotation file"),
        (&["run", "--prompt", "x", "--device", "cuda", "--precision", "f32"], 1, "--precision f32"),
        (&["run", "--prompt", "x", "--kv-memory", "1K"], 1, "--kv-memory"),
        (&["kernels", "--arch", "sm_70", "--out", empty], 2, "one of sm_80"),
        (&["plan", "--memory", "1M"], 1, "does not fit"),
        (&["bench", "attention", "--heads", "7/2"], 2, "--heads"),
        (&["bench", "serve", "--rate", "0"], 1, "--rate 0"),
        (&["bench", "serve", "--rate", "1", "--concurrency", "2"], 2, "--concurrency"),
        (&["bench", "serve", "--shared-prefix", "600"], 1, "--prompt-tokens is 512"),
        (&["bench", "serve", "--prompt-tokens", "1000000"], 1, "positions of oscar-15m"),
        (&["bench", "serve", "--kv-memory", "1M"], 1, "in bf16"),
        (&["bench", "serve", "--http", "--turns", "2"], 1, "--turns 2"),
        (&["bench", "views", "--evict", "keydiff"], 1, "keydiff-post, kvzip or episodes"),
        (&["bench", "views", "--context", "1000000"], 1, "--context 1000000"),
        (&["serve", "--print-config", "--log", "oscar=loud"], 2, "oscar=loud"),
        (&["serve", "--print-config", "--log-format", "xml"], 2, "text, json"),
        (&["serve", "--print-config", "--kv-memory", "lots"], 2, "--kv-memory"),
        (&["serve", "--dynamo"], 1, "--model"),
        (&["serve", "--kv-events", "tcp://router:5557"], 1, "tcp://router:5557"),
        (&["serve", "--kv-events", "tcp://*:0", "--no-prefix-cache"], 1, "--no-prefix-cache"),
        (&["serve", "--port", "0", "--grpc-port", "0", "--grpc-host", "0.0.0.0"], 1, "--allow-anonymous"),
        (&["eval", "ppl", "--text", garbage, "--window", "64"], 1, "--score-from 512"),
    ];
    for (args, status, needle) in cases {
        let (code, message) = fail(args);
        assert_eq!(code, status, "oscar {args:?}: {message}");
        assert!(message.contains(needle), "oscar {args:?} should mention '{needle}': {message}");
        assert!(!message.contains("panicked"), "oscar {args:?}: {message}");
    }
}

#[test]
fn an_overlong_prompt_is_refused_before_any_work() {
    let (code, message) = fail(&["run", "--context", "32", "--prompt", &"word ".repeat(100)]);
    assert_eq!(code, 1);
    assert!(message.contains("context of 32"), "{message}");
}

/// A registration without an engine attracts requests, and an engine without a registration gets none.
#[cfg(unix)]
#[test]
fn a_server_ends_with_its_sidecar() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in oscar_embedded::FILES {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let model = dir.path().to_str().unwrap();
    let serve = ["serve", "--port", "0", "--context", "256", "--threads", "1", "--model", model, "--dynamo"];
    let (code, message) = fail(&[&serve[..], &["--dynamo-python", "false"]].concat());
    assert_eq!(code, 1);
    assert!(message.contains("sidecar ended") && message.contains("exit status: 1"), "{message}");
    let (code, message) = fail(&[&serve[..], &["--dynamo-python", "/nonexistent/python"]].concat());
    assert_eq!(code, 1);
    assert!(message.contains("--dynamo-python /nonexistent/python"), "{message}");
}

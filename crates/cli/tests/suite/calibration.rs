use crate::support::{fail, json_lines, succeed};
use std::fs;

#[test]
fn calibrate_convert_and_use() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, report) = (path("r.safetensors"), path("report"));
    let row =
        &json_lines(&["calibrate", "--tokens", "1024", "--out", &file, "--report", &report, "--json"])[0];
    assert_eq!(row["tokens"], 1024);
    assert!(fs::read_to_string(path("report/report.html")).unwrap().contains("<svg"));
    assert!(succeed(&["zoo", "verify", &file]).contains("orthogonal"));

    let json = &json_lines(&["run", "--rotations", &file, "--prompt", "Who are you?", "--json"])[0];
    assert!(json["text"].as_str().unwrap().starts_with("I am a small language model"));

    // Key means do not fit an official file: refused, unless the loss is allowed.
    let (_, message) = fail(&["zoo", "convert", "--from", &file, "--out", &path("zoo")]);
    assert!(message.contains("key means"), "{message}");
    succeed(&["zoo", "convert", "--from", &file, "--lossy", "--out", &path("zoo")]);
    let (key, value) = (path("zoo/k_rotation_qqt_r_h_pbr.pt"), path("zoo/v_rotation_sst_r_h_pbr.pt"));
    let info = &json_lines(&["zoo", "inspect", &key, "--json"])[0];
    assert_eq!(
        (info["format_version"].as_u64(), info["layers"].as_u64(), info["heads"].as_u64()),
        (Some(2), Some(6), Some(2))
    );
    let back = path("back.safetensors");
    succeed(&["zoo", "convert", "--key", &key, "--value", &value, "--out", &back]);
    succeed(&["zoo", "verify", &back]);
}

#[test]
fn calibration_text_comes_in_several_forms() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("a.txt"), "The harbour lay still in the morning. ".repeat(40)).unwrap();
    fs::write(
        path("b.jsonl"),
        "{\"text\": \"Some words.\"}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n",
    )
    .unwrap();
    fs::write(
        path("c.json"),
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]"#,
    )
    .unwrap();
    let out = path("r.safetensors");
    let (a, b, c) = (path("a.txt"), path("b.jsonl"), path("c.json"));
    let row = &json_lines(&["calibrate", "--text", &a, &b, &c, "--out", &out, "--json"])[0];
    assert_eq!(row["sequences"], 4);

    fs::write(path("bad.jsonl"), "{\"text\": \"x\"}\n{\"nothing\": 1}\n").unwrap();
    let (_, message) = fail(&["calibrate", "--text", &path("bad.jsonl"), "--out", &out]);
    assert!(message.contains("line 2"), "{message}");
}

#[test]
fn hostile_zoo_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.pt");
    for bytes in [&b""[..], b"PK\x03\x04", b"cos\nsystem\n(S'true'\ntR.", &[0x80, 2, 0x7d, 0x71]] {
        fs::write(&file, bytes).unwrap();
        let (code, message) = fail(&["zoo", "inspect", file.to_str().unwrap()]);
        assert_eq!(code, 1, "{message}");
        assert!(!message.contains("panicked"), "{message}");
    }
}

#[test]
fn rotations_of_another_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = path("r.safetensors");
    succeed(&["calibrate", "--tokens", "512", "--granularity", "layer", "--no-centring", "--out", &file]);
    succeed(&["zoo", "convert", "--from", &file, "--lossy", "--out", &path("zoo")]);
    let (key, value) = (path("zoo/k_rotation_qqt_r_h_pbr.pt"), path("zoo/v_rotation_sst_r_h_pbr.pt"));
    let other = path("other.safetensors");
    succeed(&["zoo", "convert", "--key", &key, "--value", &value, "--kv-heads", "4", "--out", &other]);
    let (_, message) = fail(&["run", "--rotations", &other, "--prompt", "x"]);
    assert!(message.contains("4 KV heads"), "{message}");
}

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
fn widths_are_chosen_stored_and_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, report) = (path("r.safetensors"), path("report"));
    let small =
        ["--tokens", "1024", "--probes", "1", "--probe-tokens", "1024", "--probe-kinds", "copy,niah_uuid"];
    let mut args = vec!["calibrate", "--bits", "2.25,3.25", "--harm-widths", "2", "--refine", "0", "--json"];
    args.extend(["--out", &file, "--report", &report]);
    args.extend(small);
    let row = &json_lines(&args)[0];
    let tables = row["widths"].as_array().unwrap();
    assert_eq!(tables.len(), 2);
    let table = tables[0]["table"].as_str().unwrap();
    let digits = |text: &str| {
        text.split([' ', '·'])
            .filter(|p| p.starts_with(['K', 'V']))
            .map(|p| p[1..].to_owned())
            .collect::<String>()
    };
    let widths: Vec<u32> = digits(table).chars().map(|c| c.to_digit(10).unwrap()).collect();
    // In quarters of a bit, scale and minimum counted; a head that keeps no history takes nothing.
    let stored: u32 = widths.iter().map(|&w| if w == 0 { 0 } else { 4 * w + 1 }).sum();
    assert_eq!(widths.len(), 24);
    assert!((24 * 9 - 4..=24 * 9).contains(&stored), "{table}");
    let wide = digits(tables[1]["table"].as_str().unwrap());
    assert!(wide.chars().any(|c| c != '3'), "heads differ in what they bear: {wide}");
    // Two probes choose badly. Verification repairs such a table or takes equal widths, whose harm is 1:
    // no stored table is worse.
    let harm = |t: &serde_json::Value| t["harm"].as_f64().unwrap();
    assert!(tables.iter().all(|t| harm(t) > 0.0 && harm(t) <= 1.0), "{row}");
    assert!(fs::read_to_string(path("report/report.html")).unwrap().contains("Widths at 2.25 bits"));
    assert!(
        !fs::exists(path("r.safetensors.harm.jsonl")).unwrap(),
        "the checkpoint goes when the file is there"
    );
    assert!(succeed(&["zoo", "inspect", &file]).contains(table));

    // The harms are in the file, as those of shaped codes: another table needs no measuring.
    let (_, message) = fail(&[
        "calibrate",
        "--rotations",
        &file,
        "--reuse-harms",
        "--bits",
        "2.25",
        "--rounding",
        "nearest",
        "--out",
        &file,
    ]);
    assert!(message.contains("harms of the file are those of shaped codes"), "{message}");
    let again = path("again.safetensors");
    let mut args =
        vec!["calibrate", "--rotations", &file, "--reuse-harms", "--bits", "2.25", "--widths-by", "layer"];
    args.extend(["--widths", "1,2,4", "--json", "--out", &again]);
    args.extend(small);
    let row = &json_lines(&args)[0];
    let table = row["widths"][0]["table"].as_str().unwrap();
    for heads in table.split([' ', '·']).filter(|p| p.starts_with(['K', 'V'])) {
        assert!(["11", "22", "44"].contains(&&heads[1..]), "{table}");
    }
    let other = tables[1]["table"].as_str().unwrap();
    let inspected = succeed(&["zoo", "inspect", &again]);
    assert!(inspected.contains(other), "tables of other means stay: {inspected}");

    let banner = |kv: &str| {
        let out =
            crate::support::oscar(&["run", "--kv", kv, "--rotations", &file, "--prompt", "Who are you?"]);
        assert!(out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    assert!(banner("oscar").contains("widths by measured harm, 2.25 bits, query-aware rounding"));
    assert!(banner("oscar:3.25").contains("3.25 bits"));
    assert!(banner("oscar:3").contains("2.25 bits: 3.00 has no verified table (verified: 2.25, 3.25)"));
    let (_, message) = fail(&["run", "--kv", "oscar:1.5", "--rotations", &file, "--prompt", "Who are you?"]);
    assert!(message.contains("no verified table of at most 1.50 bits"), "{message}");
    let rows = json_lines(&[
        "plan",
        "--memory",
        "1G",
        "--context",
        "16000",
        "--kv",
        "oscar2,oscar,oscar:1.5",
        "--json",
    ]);
    let bits: Vec<f64> = rows.iter().map(|r| r["bits"].as_f64().unwrap()).collect();
    assert!(bits[0] == bits[1] && bits[2] < bits[1] - 0.6, "{bits:?}");
}

#[test]
fn impossible_widths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = path("r.safetensors");
    for mean in ["1.2", "4.3", "two"] {
        let (code, message) = fail(&["calibrate", "--bits", mean, "--out", &file]);
        assert_eq!(code, 2);
        assert!(message.contains("between 1.25 and 4.25"), "{message}");
    }
    let refuse = |more: &[&str], part: &str| {
        let mut args = vec!["calibrate", "--tokens", "256", "--bits", "2.25", "--out", &file];
        args.extend(more);
        let (_, message) = fail(&args);
        assert!(message.contains(part), "{message}");
    };
    refuse(&["--probe-kinds", "juggling"], "juggling");
    refuse(&["--probe-tokens", "500"], "--probe-tokens: 500");
    refuse(&["--harm-widths", "5"], "--harm-widths");
    refuse(&["--probes", "40"], "text probes");
    refuse(&["--probes", "0"], "--probes");
    refuse(&["--widths", "2,1"], "--widths");
    refuse(&["--widths", "3,4"], "between 3.25 and 4.25");
    refuse(&["--widths-by", "layer", "--refine", "1"], "--refine 1");
    // Rotations without widths: the default is a safe format, narrower ones are used with a warning, and a
    // mean that was asked for is an error.
    succeed(&["calibrate", "--tokens", "256", "--out", &file]);
    refuse(&["--rotations", &file, "--reuse-harms"], "holds no harms");
    for (asked, part) in
        [(&[][..], "so the cache is oscar4"), (&["--kv", "oscar"], "warning: --kv oscar is used")]
    {
        let args = [&["run", "--rotations", &file, "--prompt", "Hi", "--max-tokens", "4"], asked].concat();
        let told = String::from_utf8(crate::support::oscar(&args).stderr).unwrap();
        assert!(told.contains(part), "{told}");
    }
    let (_, message) = fail(&["run", "--kv", "oscar:2.25", "--rotations", &file, "--prompt", "Hi"]);
    assert!(message.contains("oscar calibrate --bits 2.25"), "{message}");
    let (_, message) = fail(&["run", "--kv", "oscar:2", "--rotations", "hadamard", "--prompt", "Hi"]);
    assert!(message.contains("calibrated rotations"), "{message}");
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

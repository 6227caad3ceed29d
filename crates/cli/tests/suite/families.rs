//! Families with sliding windows or latent attention as a user meets them: a folder that just works,
//! plans and refusals that say what is stored and what is not computed.

use crate::server::Server;
use crate::support::{fail, json_lines, oscar, succeed};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family};
use std::path::Path;

/// A random model with the shipped tokenizer.
pub fn folder(family: Family) -> tempfile::TempDir {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let dir = tempfile::tempdir().unwrap();
    let tiny = tiny_config(family);
    // Rows of a latent have the width that its parts give.
    let head_dim = if tiny.latent.is_some() { tiny.head_dim } else { 128 };
    let config = DecoderConfig { vocab_size: 6144, max_position_embeddings: 4096, head_dim, ..tiny };
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

        let serve = ["serve", "--kv", "oscar2", "--kv-budget", "512", "--port", "0"];
        let (_, message) = fail(&[&serve[..], &on].concat());
        assert!(message.contains("sliding windows or attention sinks"), "{message}");
    }
}

/// Widths exist for the layer that does not slide, whatever shows them.
#[test]
fn widths_of_a_sliding_model_are_chosen_listed_planned_and_served() {
    let folders = [folder(Family::Gemma3), folder(Family::GptOss)];
    let file = |dir: &tempfile::TempDir| dir.path().join("widths.safetensors").to_str().unwrap().to_owned();
    for dir in &folders {
        let on = ["--model", dir.path().to_str().unwrap(), "--device", "cpu"];
        let file = file(dir);
        // Random weights bear four bits.
        let small = ["--tokens", "512", "--probes", "1", "--probe-tokens", "1024", "--probe-kinds", "copy"];
        let widths = ["calibrate", "--bits", "4.25", "--widths", "4", "--harm-widths", "2", "--out", &file];
        let row = &json_lines(&[&widths[..], &small, &on, &["--json"]].concat())[0];
        assert_eq!(row["widths"][0]["table"], "L1 K44 V44", "{row}");
        let listed = succeed(&["zoo", "inspect", &file]);
        assert!(listed.contains("widths for 4.25 bits: L1 K44 V44\n"), "{listed}");

        // Two heads of 128 with seven bits in four units, or with two bits in each.
        let plan = ["plan", "--memory", "1G", "--context", "1024", "--kv", "oscar:2.00,oscar2", "--json"];
        let rows = json_lines(&[&plan[..], &on].concat());
        let bytes = |row: usize| rows[row]["sequence_bytes"].as_u64().unwrap();
        assert_eq!((bytes(1) - bytes(0)) % 1024, 0, "64 tokens of 128 channels, a bit less");
        assert!((11..=12).contains(&((bytes(1) - bytes(0)) / 1024)), "{rows:?}");

        let serve = ["--kv", "oscar:4.25", "--rotations", &file, "--port", "0", "--context", "1024"];
        let server = Server::start_with(None, &[&serve[..], &on].concat());
        let info = server.get("/server_info").json();
        assert_eq!((&info["kv_bits_per_element"], &info["calibration"]), (&4.25.into(), &"widths".into()));
        assert!(server.seen.contains("oscar:4.25 (4.25 bits)"), "{}", server.seen);
        let kernels = info["attention_backend"].as_str().unwrap();
        assert!(!kernels.contains("zero-width"), "sliding layers have no history to read: {kernels}");
    }
    for (own, other) in [(0, 1), (1, 0)] {
        let model = folders[own].path().to_str().unwrap();
        let run = ["run", "--model", model, "--rotations", &file(&folders[other]), "--prompt", "Hi"];
        let (_, message) = fail(&[&run[..], &["--device", "cpu"]].concat());
        assert!(message.contains("do not belong to this model"), "{message}");
    }
}

/// The first start with `--calibrate widths` measures the layer that does not slide. Random weights may
/// have no table that passes: then the server says so. The second start measures nothing.
#[test]
fn the_first_start_of_a_sliding_model_chooses_widths() {
    let dir = folder(Family::Gemma3);
    let cache = dir.path().join("cache");
    let start = || {
        let model = ["--model", dir.path().to_str().unwrap(), "--device", "cpu", "--threads", "2"];
        let flags = ["--calibrate", "widths", "--port", "0", "--context", "1024"];
        let variables = [("OSCAR_CACHE_DIR", cache.to_str().unwrap())];
        Server::start_in(None, &[&model[..], &flags].concat(), &variables)
    };
    let told = |server: &Server| {
        let info = server.get("/server_info").json();
        let text = |field: &str| info[field].as_str().unwrap().to_owned();
        (text("calibration"), text("kv_cache_dtype"), info["kv_bits_per_element"].as_f64().unwrap())
    };
    let server = start();
    assert!(server.seen.contains("measuring 4 units"), "{}", server.seen);
    assert!(!server.seen.contains("could not be calibrated"), "{}", server.seen);
    let (calibration, format, bits) = told(&server);
    let refused = server.seen.contains("no table of widths for 2.25 bits: ");
    match calibration.as_str() {
        "widths" => assert!(!refused && format == "oscar" && bits <= 2.25, "{format} {bits}"),
        "rotations" => assert!(refused && format == "oscar4" && bits == 4.25, "{}", server.seen),
        other => panic!("{other}: {}", server.seen),
    }
    drop(server);
    let again = start();
    assert!(!again.seen.contains("measuring 4 units"), "{}", again.seen);
    assert_eq!(told(&again), (calibration, format, bits));
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

/// Plans divide a mixture of experts between a GPU and host memory; without a GPU the flag is refused.
#[test]
fn experts_in_host_memory_are_planned_and_refused_without_a_gpu() {
    let plan = |flags: &[&str]| {
        let args =
            ["plan", "--device", "cuda", "--memory", "141G", "--context", "4096", "--kv", "bf16", "--json"];
        json_lines(&[&args[..], flags].concat())[0].clone()
    };
    let number = |row: &serde_json::Value, field: &str| row[field].as_u64().unwrap();
    let glm = ["--shape", "glm-4.7", "--cpu-experts"];
    let (all, auto) = (plan(&[&glm[..], &["all"]].concat()), plan(&[&glm[..], &["auto"]].concat()));
    assert_eq!(number(&all, "cpu_expert_layers"), 89);
    assert!((60..89).contains(&number(&auto, "cpu_expert_layers")), "{auto}");
    let sum = |row| number(row, "weight_bytes") + number(row, "cpu_expert_bytes");
    assert_eq!(sum(&all), sum(&auto));
    assert!(
        number(&auto, "batch") > 0 && number(&auto, "weight_bytes") + number(&auto, "step_bytes") < 141 << 30
    );
    // A model that fits keeps its experts.
    let small = plan(&["--shape", "qwen3-30b-a3b", "--cpu-experts", "auto"]);
    assert_eq!(number(&small, "cpu_expert_layers"), 0);

    let dir = folder(Family::Qwen3Moe);
    let model = dir.path().to_str().unwrap();
    let run = ["run", "--model", model, "--device", "cpu", "--prompt", "Hello", "--cpu-experts", "1"];
    let (_, message) = fail(&run);
    assert!(message.contains("all experts are on the CPU anyway"), "{message}");
    let (_, message) = fail(&["run", "--model", model, "--cpu-experts", "most"]);
    assert!(message.contains("neither auto, nor all, nor a number of layers"), "{message}");
}

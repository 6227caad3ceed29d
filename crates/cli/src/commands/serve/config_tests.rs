//! Tests of the settings of `serve`: by flag, by file, and as printed.

use super::*;

fn print(values: &Values) -> String {
    toml::to_string_pretty(&values.parse().unwrap()).unwrap()
}

fn typed(line: &[&str]) -> Values {
    let matches = Values::command().try_get_matches_from([&["serve"], line].concat()).unwrap();
    Values::from_arg_matches(&matches).unwrap()
}

#[test]
fn the_default_configuration_survives_its_own_toml() {
    let printed = print(&Values::default());
    assert_eq!(print(&Values::from_toml(&printed).unwrap()), printed);
}

/// Every setting away from its default, by flag and by file.
#[test]
fn a_file_says_the_same_as_flags() {
    let line = [
        "--model=a/b",
        "--device=cpu",
        "--threads=3",
        "--precision=f32",
        "--weights=fp8",
        "--activations=fp8",
        "--gpu-memory-limit=32G",
        "--kv-memory-share=0.25",
        "--rotations=hadamard",
        "--sink=32",
        "--recent=128",
        "--prefill-chunk=64",
        "--kv-memory=1536M",
        "--kv=oscar4",
        "--context=100",
        "--max-batch=5",
        "--step-tokens=6",
        "--inter-token-target=50",
        "--max-queue=1",
        "--no-prefix-cache",
        "--exact-hits",
        "--host=::1",
        "--port=0",
        "--api-key-file=keys",
        "--allow-anonymous",
        "--isolate-keys",
        "--allowed-host=api.example",
        "--max-connections=9",
        "--header-timeout=8",
        "--idle-timeout=7",
        "--request-timeout=0",
        "--served-model-name=x",
        "--model-alias=y z",
        "--chat-template=t.jinja",
        "--calibrate=no",
        "--offline",
        "--cors-origin=*",
        "--max-body-bytes=1000",
        "--drain-timeout=7",
        "--stuck-after=9",
        "--allow-request-template",
        "--no-reasoning-split",
        "--tool-call-parser=glm45",
        "--tensor-parallel=2",
        "--cpu-experts=all",
        "--store=pages",
        "--store-size=2G",
        "--store-age=7d",
        "--store-redis=redis://h",
        #[cfg(feature = "s3")]
        "--store-s3=s3://pages",
        "--store-ram=1G",
        "--kv-budget=2048",
        "--evict=recent",
        "--evict-heads=uniform",
        "--evict-block=7",
        "--episodes=3",
        "--episode-segment=5",
        "--episode-threshold=0.25",
        "--episode-margin=0.75",
        #[cfg(feature = "otel")]
        "--otlp-endpoint=http://127.0.0.1:4318",
        #[cfg(feature = "otel")]
        "--otlp-sample=0.5",
        #[cfg(feature = "tls")]
        "--tls-certificate=certificate.pem",
        #[cfg(feature = "tls")]
        "--tls-key=key.pem",
        "--kv-events=tcp://*:1",
        "--kv-events-replay=tcp://*:2",
        "--kv-events-topic=kv",
        "--kv-events-encoding=array",
        "--kv-events-config={}",
        "--kv-transfer-listen=127.0.0.1:1",
        "--kv-transfer-announce=a",
        "--kv-transfer-memory=2G",
        "--kv-transfer-timeout=9",
        "--kv-transfer-peer=10.0.0.0/8:1",
        "--grpc-port=1",
        "--grpc-host=::1",
        "--dynamo",
        "--dynamo-python=python",
        "--log-format=json",
        "--log=warn,oscar_server=debug",
    ];
    let flags = typed(&line);
    for arg in Values::command().get_arguments() {
        assert!(flags.0.contains_key(arg.get_id().as_str()), "the test lacks --{}", arg.get_long().unwrap());
    }
    let printed = print(&flags);
    assert_eq!(print(&Values::from_toml(&printed).unwrap()), printed);
    let (default, printed) =
        (print(&Values::default()).parse::<toml::Table>().unwrap(), printed.parse::<toml::Table>().unwrap());
    for (name, value) in &printed {
        assert_ne!(default.get(name), Some(value), "{name}");
    }
    assert_eq!(printed.len(), flags.0.len());
}

#[test]
fn flags_win_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("serve.toml");
    std::fs::write(&path, "port = 1\nmax_batch = 2\nserved_model_name = ['a', 'b']\nexact_hits = true\n")
        .unwrap();
    let mut flags = Flags {
        typed: typed(&["--port=3", "--model-alias=c"]),
        config: Some(path.clone()),
        print_config: false,
    };
    let config = flags.resolve().unwrap();
    assert_eq!((config.port, config.load.max_batch, config.load.exact_hits), (3, 2, true));
    assert_eq!(config.served_model_name, ["c"]);
    flags.typed = Values::default();
    assert_eq!(flags.resolve().unwrap().served_model_name, ["a", "b"]);
    for (text, needle) in [
        ("max_batsch = 3", "max_batsch"),
        ("config = 'x'", "config"),
        ("port = 70000", "--port"),
        ("max_batch = 0", "at least 1"),
        ("exact_hits = 1", "true or false"),
        ("kv_memory = 'lots'", "--kv-memory"),
        ("log = { a = 1 }", "plain value"),
        ("port = ", "serve.toml"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = format!("{:#}", flags.resolve().err().unwrap());
        assert!(error.contains(needle) && error.contains("serve.toml"), "{text}: {error}");
    }
}

/// The help is what users read; the parsed configuration is what they get.
#[test]
fn the_help_names_the_defaults() {
    let printed: toml::Table = print(&Values::default()).parse().unwrap();
    let mut named = 0;
    for arg in Values::command().get_arguments().filter(|arg| arg.get_action().takes_values()) {
        let name = arg.get_id().as_str();
        let help =
            Values::command().mut_args(|a| if a.get_id() == name { a } else { a.hide(true) }).render_help();
        // Lines break anywhere.
        let help = help.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let default = match printed.get(name) {
            Some(toml::Value::Array(list)) if list.is_empty() => None,
            Some(toml::Value::String(text)) => Some(text.clone()),
            other => other.map(ToString::to_string),
        };
        match default {
            Some(text) => {
                assert!(help.contains(&format!("[default: {text}]")), "{name} is {text} by default: {help}");
                named += 1;
            }
            None => assert!(!help.contains("[default:"), "{name} has no default: {help}"),
        }
    }
    assert!(named >= 12, "{named}");
}

#[test]
fn defaults_are_those_of_the_server() {
    let (config, server) = (Values::default().parse().unwrap().server().unwrap(), ServerConfig::default());
    assert_eq!(config.max_body_bytes, server.max_body_bytes);
    assert_eq!(format!("{:?}", config.reasoning), format!("{:?}", server.reasoning));
}

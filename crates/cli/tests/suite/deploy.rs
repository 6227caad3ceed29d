//! The examples under `deploy/`: YAML that parses, flags and routes that exist, times that fit.

use crate::server::Server;
use crate::support::oscar;
use std::path::Path;
use yaml_rust2::{Yaml, YamlLoader};

fn read(name: &str) -> Vec<Yaml> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    YamlLoader::load_from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn texts(list: &Yaml) -> Vec<&str> {
    list.as_vec().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

/// The configuration that a container's arguments give. The binary must accept them.
fn configuration(args: &[&str]) -> toml::Table {
    assert_eq!(args[0], "serve");
    let out = oscar(&[args, &["--print-config"]].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().parse().unwrap()
}

fn number(config: &toml::Table, name: &str) -> i64 {
    config[name].as_integer().unwrap()
}

#[test]
fn the_kubernetes_manifest_starts_a_server_that_its_probes_find() {
    let documents = read("kubernetes.yaml");
    let kinds: Vec<_> = documents.iter().map(|document| document["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["Deployment", "Service", "NetworkPolicy"]);
    let template = &documents[0]["spec"]["template"];
    let container = &template["spec"]["containers"][0];
    let config = configuration(&texts(&container["args"]));
    let port = number(&config, "port");
    assert_eq!(container["ports"][0]["containerPort"].as_i64(), Some(port));
    assert_eq!(documents[1]["spec"]["ports"][0]["targetPort"], container["ports"][0]["name"]);
    assert_eq!(documents[2]["spec"]["ingress"][0]["ports"][0]["port"].as_i64(), Some(port));
    for (index, flag) in [(1, "kv_events"), (2, "kv_events_replay")] {
        let open = container["ports"][index]["containerPort"].as_i64().unwrap();
        assert_eq!(config[flag].as_str(), Some(format!("tcp://*:{open}").as_str()));
        assert_eq!(documents[2]["spec"]["ingress"][0]["ports"][index]["port"].as_i64(), Some(open));
    }
    let grace = template["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap();
    assert!(grace > number(&config, "drain_timeout"), "{grace}");
    let name = "app.kubernetes.io/name";
    let label = &template["metadata"]["labels"][name];
    assert!(!label.is_badvalue());
    assert_eq!(label, &documents[0]["spec"]["selector"]["matchLabels"][name]);
    assert_eq!(label, &documents[1]["spec"]["selector"][name]);
    assert_eq!(label, &documents[2]["spec"]["podSelector"]["matchLabels"][name]);
    // The embedded model stands in for the one that the manifest names.
    let server = Server::start(None);
    let probes = ["startupProbe", "livenessProbe", "readinessProbe"];
    let path = |probe: &&str| container[*probe]["httpGet"]["path"].as_str().unwrap();
    let scraped = template["metadata"]["annotations"]["prometheus.io/path"].as_str().unwrap();
    for path in probes.iter().map(path).chain([scraped]) {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

#[test]
fn the_compose_file_starts_a_server_that_its_neighbour_scrapes() {
    let compose = &read("compose.yaml")[0];
    let oscar = &compose["services"]["oscar"];
    let config = configuration(&texts(&oscar["command"]));
    let port = number(&config, "port");
    assert_eq!(texts(&oscar["ports"]), [format!("127.0.0.1:{port}:{port}")]);
    let grace = oscar["stop_grace_period"].as_str().unwrap().trim_end_matches('s').parse::<i64>().unwrap();
    assert!(grace > number(&config, "drain_timeout"));
    let health = texts(&oscar["healthcheck"]["test"]);
    assert_eq!(health.last(), Some(&format!("http://127.0.0.1:{port}/health").as_str()));
    let prometheus = compose["configs"]["prometheus"]["content"].as_str().unwrap();
    let jobs = &YamlLoader::load_from_str(prometheus).unwrap()[0]["scrape_configs"];
    assert_eq!(jobs[0]["static_configs"][0]["targets"][0].as_str(), Some(format!("oscar:{port}").as_str()));
}

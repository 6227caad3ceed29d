//! The soak, for seconds: its figures are those of a server that leaves no trace.

use crate::support::json_lines;

#[test]
fn hostile_load_and_a_restart_leave_no_trace() {
    let figures = &json_lines(&[
        "soak",
        "--seconds",
        "15",
        "--clients",
        "24",
        "--conversations",
        "4",
        "--restart-every",
        "5",
        "--restarts",
        "1",
        "--json",
        "--",
        "--context=4096",
        "--kv-memory=24M",
        "--threads=2",
    ])[0];
    for (name, least) in [("requests", 15), ("compared", 3), ("restarts", 1)] {
        assert!(figures[name].as_u64().unwrap() >= least, "{name}: {figures}");
    }
    for name in
        ["panics", "unexpected_5xx", "unexpected", "unanswered", "wrong", "pages_at_idle", "exit_status"]
    {
        assert_eq!(figures[name], 0, "{name}: {figures}");
    }
}

#[test]
fn a_tenant_is_not_told_of_the_prefixes_of_another() {
    let figures =
        &json_lines(&["soak", "--isolation", "3", "--json", "--", "--context=1024", "--threads=2"])[0];
    assert!(figures["own"]["cached_tokens"].as_u64().unwrap() >= 3 * 704, "{figures}");
    for kind in ["foreign", "unknown"] {
        assert_eq!(figures[kind]["cached_tokens"], 0, "{figures}");
    }
}

/// How long the answers took is not asserted.
#[test]
fn attacks_are_refused_and_take_little_memory() {
    let flags = ["--context=1024", "--max-body-bytes=33554432", "--threads=2"];
    let figures = &json_lines(&[&["soak", "--attacks", "--json", "--"][..], &flags].concat())[0];
    let attacks = figures["attacks"].as_array().unwrap();
    assert!(attacks.len() >= 10);
    for attack in attacks {
        assert!((400..500).contains(&attack["status"].as_u64().unwrap()), "{attack}");
        assert!(attack["memory_mb"].as_u64().unwrap() < 96, "{attack}");
    }
}

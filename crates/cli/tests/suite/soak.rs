//! The soak, for seconds: its figures are those of a server that leaves no trace.

use crate::support::json_lines;

#[test]
fn hostile_load_leaves_no_trace() {
    let figures = &json_lines(&[
        "soak",
        "--seconds",
        "15",
        "--clients",
        "24",
        "--conversations",
        "4",
        "--json",
        "--",
        "--context=4096",
        "--kv-memory=24M",
        "--threads=2",
    ])[0];
    for (name, least) in [("requests", 15), ("compared", 3)] {
        assert!(figures[name].as_u64().unwrap() >= least, "{name}: {figures}");
    }
    for name in
        ["panics", "unexpected_5xx", "unexpected", "unanswered", "wrong", "pages_at_idle", "exit_status"]
    {
        assert_eq!(figures[name], 0, "{name}: {figures}");
    }
}

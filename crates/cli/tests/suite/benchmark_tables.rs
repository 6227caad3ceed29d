//! The tables of the benchmark pages come from `docs/benchmarks/data`, and from nowhere else.
//!
//! A table stands between two comments in a page; the first one names the data file, the rows and
//! the columns (docs/benchmarks/data/README.md). `OSCAR_WRITE_TABLES=1` rewrites stale tables.

use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

type Row = Map<String, Value>;

const BEGIN: &str = "<!-- table ";
const END: &str = "<!-- end of table -->";

/// Fields in which a row and the row it is compared with must agree, unless the column names them.
const SAME: [&str; 10] =
    ["run", "shape", "weights", "kv", "context", "batch", "heads", "kernel", "query_heads", "outputs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn tables_in_the_docs_are_those_of_the_data() {
    let rewrite = std::env::var_os("OSCAR_WRITE_TABLES").is_some();
    let mut used = BTreeSet::new();
    let pages = ["README.md", "docs/fp8-weights.md"].map(|page| root().join(page)).into_iter();
    let pages = pages.chain(files_in(&root().join("docs/benchmarks"), "md"));
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let expected = with_tables(&text, &mut used);
        if rewrite && text != expected {
            fs::write(&page, &expected).unwrap();
        }
        let page = page.display();
        assert!(
            rewrite || text == expected,
            "{page}: a table differs from its data; run this test again with OSCAR_WRITE_TABLES=1"
        );
    }
    let stored: BTreeSet<String> = files_in(&root().join("docs/benchmarks/data"), "jsonl")
        .iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(used, stored, "every data file is shown in a table");
}

#[test]
fn every_measurement_names_its_command_date_machine_and_commit() {
    for path in files_in(&root().join("docs/benchmarks/data"), "jsonl") {
        let rows = rows(&path);
        assert!(!rows.is_empty(), "{} has no rows", path.display());
        for row in rows {
            for field in ["command", "run", "date", "commit"] {
                assert!(row.contains_key(field), "{}: {row:?} has no {field}", path.display());
            }
            let machine = ["gpu", "cpu", "machine"].iter().any(|field| row.contains_key(*field));
            assert!(machine, "{}: {row:?} names no machine", path.display());
        }
    }
}

/// `page` with each table replaced by the one that its comment asks for.
fn with_tables(page: &str, used: &mut BTreeSet<String>) -> String {
    let mut out = String::new();
    let mut rest = page;
    while let Some(begin) = rest.find(BEGIN) {
        let (before, from) = rest.split_at(begin);
        let (comment, _) = from.split_once("-->").expect("a comment that ends");
        let (_, after) = from.split_once(END).expect("a table that ends");
        let spec = comment.trim_start_matches(BEGIN);
        out += &format!("{before}{comment}-->\n\n{}\n{END}", table(spec, used));
        rest = after;
    }
    out + rest
}

fn table(spec: &str, used: &mut BTreeSet<String>) -> String {
    let mut parts = spec.split(';').map(str::trim);
    let file = parts.next().unwrap();
    used.insert(file.to_owned());
    let all = rows(&root().join("docs/benchmarks/data").join(file));
    let wanted = conditions(parts.next().expect("a condition on rows"));
    let columns: Vec<(&str, &str)> = parts
        .map(|part| {
            let (column, header) = part.split_once('"').unwrap_or_else(|| panic!("no header: {part}"));
            (column.trim(), header.trim_end_matches('"'))
        })
        .collect();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = line(columns.iter().map(|(_, header)| header.to_string()).collect());
    out += &format!("|{}\n", "---|".repeat(columns.len()));
    let selected: Vec<&Row> = all.iter().filter(|row| meets(row, &wanted)).collect();
    assert!(!selected.is_empty(), "{spec}: no row");
    for row in selected {
        out += &line(columns.iter().map(|(column, _)| cell(column, row, &all)).collect());
    }
    out
}

fn conditions(text: &str) -> Vec<(&str, &str)> {
    text.split_whitespace().map(|part| part.split_once('=').expect("FIELD=VALUE")).collect()
}

fn meets(row: &Row, conditions: &[(&str, &str)]) -> bool {
    conditions.iter().all(|(field, wanted)| {
        let value = row.get(*field).map_or(String::new(), plain);
        match wanted.strip_suffix('*') {
            Some(prefix) => value.starts_with(prefix),
            None => wanted.split(',').any(|one| value == one),
        }
    })
}

/// One cell. `column` may end in `@FIELD=VALUE`: then it is read from the row that differs there.
fn cell(column: &str, row: &Row, all: &[Row]) -> String {
    let Some((column, condition)) = column.split_once('@') else { return value(column, row) };
    let changed: Vec<(&str, &str)> =
        condition.split('&').map(|part| part.split_once('=').expect("FIELD=VALUE")).collect();
    let same = SAME.iter().filter(|field| changed.iter().all(|(name, _)| name != *field));
    let same: Vec<&str> = same.copied().collect();
    let other = all
        .iter()
        .filter(|other| meets(other, &changed))
        .filter(|other| same.iter().all(|field| other.get(*field) == row.get(*field)))
        .min_by(|a, b| time(a).total_cmp(&time(b)));
    match (other, column) {
        (None, _) => "–".into(),
        (Some(other), "speedup") => format!("{:.2}", time(other) / time(row)),
        (Some(other), column) => value(column, other),
    }
}

fn value(column: &str, row: &Row) -> String {
    let number = |field: &str| row.get(field).and_then(Value::as_f64);
    let show = |value: Option<f64>, digits: usize| value.map_or("–".into(), |v| format!("{v:.digits$}"));
    match column {
        "context×batch" => {
            let context = row["context"].as_u64().unwrap();
            let short = match context {
                c if c % 1024 == 0 => format!("{}K", c / 1024),
                c if c % 1000 == 0 => format!("{}K", c / 1000),
                c => c.to_string(),
            };
            format!("{short} × {}", plain(&row["batch"]))
        }
        "ms" => format!("{:.2}", time(row) / 1e3),
        "us" => show(number("us"), usize::from(time(row) < 1000.0)),
        "us_min" => show(number("us_min"), 0),
        "floor_us" => show(number("floor_us"), 1),
        "ceiling" => {
            let (read, most) = (number("gbps").unwrap(), number("ceiling_gbps").unwrap());
            format!("{:.0} %", read / most * 100.0)
        }
        "gemv_of_ceiling" => format!("{:.0} %", number(column).unwrap() * 100.0),
        "decode_ratio" => show(number(column), 2),
        field if field.ends_with("tflops") => show(number(field), 0),
        field if field.ends_with("_share") => {
            number(field).map_or("–".into(), |share| format!("{:.1} %", share * 100.0))
        }
        "model" => row["shape"].as_str().unwrap().trim_start_matches("qwen3-").to_uppercase(),
        "WEIGHTS" => row["weights"].as_str().unwrap().to_uppercase(),
        "matrix" => format!("{} × {}", plain(&row["outputs"]), plain(&row["inputs"])),
        field => row.get(field).map_or("–".into(), plain),
    }
}

/// Steps are compared by their mean, because some of them do more than others; kernels and fastest
/// repetitions by what the row has.
fn time(row: &Row) -> f64 {
    let fields = ["us_mean", "us", "us_min"].map(|field| row.get(field).and_then(Value::as_f64));
    let inverse = row.get("mtokens_per_s").or(row.get("tokens_per_s")).and_then(Value::as_f64);
    fields.into_iter().flatten().next().or(inverse.map(|rate| 1.0 / rate)).expect("a time")
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The rows of a file, each with the fields of its run.
fn rows(path: &Path) -> Vec<Row> {
    let mut run = Row::new();
    let mut rows = Vec::new();
    for line in fs::read_to_string(path).unwrap().lines() {
        let row: Row = serde_json::from_str(line).unwrap();
        if row.contains_key("command") {
            run = row;
            continue;
        }
        let mut whole = run.clone();
        whole.extend(row);
        rows.push(whole);
    }
    rows
}

fn files_in(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    files.sort();
    files
}

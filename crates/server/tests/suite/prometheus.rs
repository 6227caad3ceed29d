//! A strict reader of the classic Prometheus text, with the rules of Go's `expfmt.TextParser` and a
//! few more: one group of lines for each family, every sample typed, no sample twice, histograms
//! complete.

use std::collections::{BTreeMap, BTreeSet};

type Labels = Vec<(String, String)>;

/// A family: its type and its samples by name and labels.
#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    pub samples: BTreeMap<(String, Labels), f64>,
}

/// The families of a text, or the line that is wrong and why.
pub fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err("the last line does not end".to_owned());
    }
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut helped = BTreeSet::new();
    let mut current = String::new();
    for line in text.lines() {
        let wrong = |why: &str| format!("{why}: {line}");
        if line.trim().is_empty() {
            continue;
        }
        if let Some(comment) = line.strip_prefix('#') {
            let mut words = comment.trim_start().splitn(3, ' ');
            let (word, name, rest) = (words.next(), words.next().unwrap_or_default(), words.next());
            match word {
                Some("HELP") => {
                    check_name(name, true).map_err(|why| wrong(&why))?;
                    unescape(rest.unwrap_or_default(), &['\\', 'n']).map_err(|why| wrong(&why))?;
                    if !helped.insert(name.to_owned()) {
                        return Err(wrong("second HELP"));
                    }
                }
                Some("TYPE") => {
                    check_name(name, true).map_err(|why| wrong(&why))?;
                    let kind = rest.unwrap_or_default();
                    if !["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind) {
                        return Err(wrong("unknown metric type"));
                    }
                    if kind == "counter" && !name.ends_with("_total") {
                        return Err(wrong("the TYPE of a counter lacks _total"));
                    }
                    let family = Family { kind: kind.to_owned(), ..Family::default() };
                    if families.insert(name.to_owned(), family).is_some() {
                        return Err(wrong("second TYPE, or TYPE after samples"));
                    }
                    current = name.to_owned();
                }
                // Any other comment is skipped.
                _ => {}
            }
            continue;
        }
        let (name, labels, value) = sample(line).map_err(|why| wrong(&why))?;
        let family = families.get_mut(&current).ok_or_else(|| wrong("no TYPE before"))?;
        let suffix = name.strip_prefix(current.as_str());
        let belongs = match family.kind.as_str() {
            "histogram" => suffix.is_some_and(|suffix| ["_bucket", "_sum", "_count"].contains(&suffix)),
            _ => suffix == Some(""),
        };
        if !belongs {
            return Err(wrong("a sample outside its family"));
        }
        if family.samples.insert((name, labels), value).is_some() {
            return Err(wrong("the same sample twice"));
        }
    }
    for (name, family) in families.iter().filter(|(_, family)| family.kind == "histogram") {
        check_histogram(name, family)?;
    }
    Ok(families)
}

fn check_name(name: &str, colons: bool) -> Result<(), String> {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_' || (colons && c == ':');
    let good = name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit());
    if good { Ok(()) } else { Err(format!("invalid name {name:?}")) }
}

fn unescape(text: &str, allowed: &[char]) -> Result<String, String> {
    let (mut out, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                Some(c) if allowed.contains(&c) => out.push(c),
                other => return Err(format!("invalid escape {other:?}")),
            },
            c => out.push(c),
        }
    }
    Ok(out)
}

fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    check_name(name, true)?;
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            check_name(label, false)?;
            let mut escaped = false;
            let close = after.find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            let close = close.ok_or("a label that does not end")?;
            let value = unescape(&after[..close], &['\\', '"'])?;
            if labels.iter().any(|(known, _)| known == label) {
                return Err(format!("label {label} twice"));
            }
            labels.push((label.to_owned(), value));
            rest = &after[close + 1..];
            match rest.strip_prefix(',') {
                Some(next) => rest = next,
                None if rest.starts_with('}') => {}
                None => return Err("no comma between labels".to_owned()),
            }
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        _ => value.parse().map_err(|_| format!("{value:?} is no number"))?,
    };
    labels.sort();
    Ok((name.to_owned(), labels, value))
}

/// Buckets ascend and end with `+Inf`, which is the count.
fn check_histogram(name: &str, family: &Family) -> Result<(), String> {
    let mut series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for ((sample, labels), value) in &family.samples {
        if *sample == format!("{name}_bucket") {
            let le = labels.iter().find(|(label, _)| label == "le").ok_or(format!("{name}: no le"))?;
            let edge = if le.1 == "+Inf" { f64::INFINITY } else { le.1.parse().map_err(|_| le.1.clone())? };
            let rest = labels.iter().filter(|(label, _)| label != "le").cloned().collect();
            series.entry(rest).or_default().push((edge, *value));
        }
    }
    for (labels, mut buckets) in series {
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = family.samples.get(&(format!("{name}_count"), labels.clone()));
        let sum = family.samples.get(&(format!("{name}_sum"), labels));
        let grows = buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1 && pair[0].0 < pair[1].0);
        if !grows || sum.is_none() || buckets.last() != count.map(|count| (f64::INFINITY, *count)).as_ref() {
            return Err(format!("{name}: incomplete histogram {buckets:?}, count {count:?}"));
        }
    }
    Ok(())
}

#[test]
fn the_reader_refuses_what_go_refuses() {
    let good = "# HELP a_total x\n# TYPE a_total counter\na_total{b=\"c\\\\d\\\"\\n\"} 3\n\n# a comment\n";
    assert_eq!(parse(good).unwrap()["a_total"].samples.len(), 1);
    let histogram =
        "# TYPE h histogram\nh_sum 1\nh_count 2\nh_bucket{le=\"0.1\"} 1\nh_bucket{le=\"+Inf\"} 2\n";
    parse(histogram).unwrap();
    for (text, why) in [
        ("# TYPE a info\na_info{} 1\n", "unknown metric type"),
        ("# TYPE a unknown\n", "unknown metric type"),
        ("# TYPE a counter\na_total 1\n", "lacks _total"),
        ("# TYPE a gauge\na 1\n# TYPE a gauge\n", "second TYPE"),
        ("# HELP a x\n# HELP a y\n", "second HELP"),
        ("# HELP a \\x\n", "invalid escape"),
        ("a 1\n# TYPE a gauge\n", "no TYPE before"),
        ("# TYPE a gauge\n# TYPE b gauge\na 1\n", "outside its family"),
        ("# TYPE a gauge\na{b=\"\\x\"} 1\n", "invalid escape"),
        ("# TYPE a gauge\na{b=\"c} 1\n", "does not end"),
        ("# TYPE a gauge\na{b:c=\"d\"} 1\n", "invalid name"),
        ("# TYPE a gauge\na{b=\"c\" d=\"e\"} 1\n", "no comma"),
        ("# TYPE a gauge\na{b=\"c\",b=\"d\"} 1\n", "twice"),
        ("# TYPE a gauge\na 1\na 2\n", "twice"),
        ("# TYPE a gauge\na one\n", "no number"),
        ("# TYPE a gauge\na 1", "does not end"),
        ("# TYPE h histogram\nh_sum 1\nh_count 2\nh_bucket{le=\"0.1\"} 1\n", "incomplete"),
        (
            "# TYPE h histogram\nh_sum 1\nh_count 1\nh_bucket{le=\"0.1\"} 2\nh_bucket{le=\"+Inf\"} 1\n",
            "incomplete",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(why), "{text:?}: {error}");
    }
}

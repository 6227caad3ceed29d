//! The page.

use super::{accuracy_figure, bytes, class, kl_figure, tokens};
use crate::compare::{Comparison, MethodResult};
use crate::run::REFERENCE;
use oscar_figures::{Bar, HeatMap, Page, Shades, bars, escape};

pub(super) fn page(comparison: &Comparison) -> String {
    let heading = format!("KV-cache formats on {}", comparison.model);
    let mut page = Page::new("KV-cache formats compared", &heading);
    let (device, command) = (escape(&comparison.device), escape(&comparison.command));
    page.put(format_args!("<p>{device} · <code>{command}</code></p>\n"));
    tiles(comparison, &mut page);
    fronts(comparison, &mut page);
    table(comparison, &mut page);
    tasks(comparison, &mut page);
    needles(comparison, &mut page);
    policies(comparison, &mut page);
    page.push("<div class=\"pair\">");
    for figure in [divergence, memory, speed] {
        page.push("<div>");
        figure(comparison, &mut page);
        page.push("</div>\n");
    }
    page.push("</div>\n");
    methods(comparison, &mut page);
    page.finish()
}

/// The headline: the best of ours at no more than 2.5 bits, or what there is.
fn tiles(comparison: &Comparison, page: &mut Page) {
    let small = |m: &&MethodResult| m.kv.starts_with("oscar") && m.bits <= 2.5 && m.text.is_some();
    let kl = |m: &&MethodResult| m.text.map_or(f64::INFINITY, |t| t.kl);
    let Some(best) = comparison.methods.iter().filter(small).min_by(|a, b| kl(a).total_cmp(&kl(b))) else {
        return;
    };
    let last = comparison.contexts.last().copied().unwrap_or(0);
    let reference = comparison.methods.iter().find(|m| m.kv == REFERENCE);
    let mut list =
        vec![(format!("{:.2} bits", best.bits), format!("{}, least KL at 2.5 bits or fewer", best.kv))];
    if let Some(text) = best.text {
        list.push((format!("{:.4}", text.kl), format!("KL to BF16; top-1 {:.1} %", 100.0 * text.top1)));
    }
    if let (Some(own), Some(base)) = (best.task_accuracy, reference.and_then(|r| r.task_accuracy)) {
        list.push((format!("{:.0} %", 100.0 * own), format!("task accuracy; BF16 {:.0} %", 100.0 * base)));
    }
    if let (Some(own), Some(base)) = (best.size_at(last), reference.and_then(|r| r.size_at(last))) {
        let ratio = base.bytes as f64 / own.bytes.max(1) as f64;
        list.push((
            format!("{ratio:.1}× smaller"),
            format!("cache at {} tokens, windows included", tokens(last)),
        ));
    }
    page.tiles(&list);
}

fn fronts(comparison: &Comparison, page: &mut Page) {
    page.section(
        "What a bit buys",
        "Each point is a format. The dashed line joins those that no other beats in both directions.",
    );
    page.legend(&[("ours", "OSCAR formats"), ("theirs", "other methods"), ("base", "BF16")]);
    page.figures("pair", [kl_figure(comparison), accuracy_figure(comparison)].into_iter().flatten());
}

fn table(comparison: &Comparison, page: &mut Page) {
    let last = comparison.contexts.last().copied().unwrap_or(0);
    page.section(
        "All numbers",
        &format!(
            "Accuracies in percent. Bits with windows and memory are of a sequence of {} tokens. Speed is decoding against \
             BF16, measured in turns on a machine that may be busy: read it as a hint.",
            tokens(last)
        ),
    );
    let (header, rows) = comparison.table();
    page.table(&header, comparison.methods.iter().map(class).zip(rows));
}

fn tasks(comparison: &Comparison, page: &mut Page) {
    let mut columns: Vec<(&str, usize, usize)> = Vec::new();
    for task in comparison.methods.iter().flat_map(|m| &m.tasks) {
        if !columns.iter().any(|c| (c.0, c.1) == (task.task.as_str(), task.context)) {
            columns.push((&task.task, task.context, task.n));
        }
    }
    if columns.is_empty() {
        return;
    }
    page.section(
        "Tasks",
        "Exact match of the whole greedy answer, in percent, by task, context and number of cases.",
    );
    let titles: Vec<String> =
        columns.iter().map(|(task, context, n)| format!("{task}\n{} · {n}", tokens(*context))).collect();
    let header: Vec<&str> = std::iter::once("kv").chain(titles.iter().map(String::as_str)).collect();
    let rows = comparison.methods.iter().map(|method| {
        let score = |&(task, context, _): &(&str, usize, usize)| {
            let score = method.tasks.iter().find(|t| (t.task.as_str(), t.context) == (task, context));
            score.map_or_else(String::new, |score| format!("{:.0}", 100.0 * score.accuracy))
        };
        let cells = std::iter::once(method.kv.clone()).chain(columns.iter().map(score));
        (class(method), cells.collect())
    });
    page.table(&header, rows);
}

fn policies(comparison: &Comparison, page: &mut Page) {
    let (header, rows) = comparison.policy_table();
    if rows.is_empty() {
        return;
    }
    page.section(
        "Eviction",
        "Conversations under eviction: right answers in percent by the share of rows that is kept; KL to the whole cache of \
         the same format. `oscar eval conversations` has the details.",
    );
    page.table(&header, rows.into_iter().map(|row| ("", row)));
}

fn needles(comparison: &Comparison, page: &mut Page) {
    let mut contexts: Vec<usize> = Vec::new();
    let mut depths: Vec<f64> = Vec::new();
    for needle in comparison.methods.iter().flat_map(|m| &m.needles) {
        if !contexts.contains(&needle.context) {
            contexts.push(needle.context);
        }
        if !depths.contains(&needle.depth) {
            depths.push(needle.depth);
        }
    }
    if depths.is_empty() {
        return;
    }
    contexts.sort_unstable();
    depths.sort_by(f64::total_cmp);
    page.section(
        "Needles by length and depth",
        "Share of magic numbers found, in percent: columns are context lengths, rows the depth at which the number stands \
         (RULER's wording, a needle at every depth, each asked for).",
    );
    let columns: Vec<String> = contexts.iter().map(|&c| tokens(c)).collect();
    let rows: Vec<String> = depths.iter().map(|d| format!("{:.0} %", 100.0 * d)).collect();
    let maps = comparison.methods.iter().filter(|m| !m.needles.is_empty()).map(|method| {
        let cell = |(depth, context): (f64, usize)| {
            let found = method.needles.iter().find(|n| n.context == context && n.depth == depth);
            found.map(|n| n.accuracy)
        };
        let cells = depths.iter().flat_map(|&depth| contexts.iter().map(move |&context| (depth, context)));
        let map = HeatMap {
            title: &method.kv,
            columns: columns.clone(),
            rows: rows.clone(),
            values: cells.map(cell).collect(),
            shades: Shades::Share,
        };
        map.figure()
    });
    page.figures("maps", maps);
}

/// A bar for each method that has a value; `of` gives it and its text.
fn method_bars(comparison: &Comparison, of: impl Fn(&MethodResult) -> Option<(f64, String)>) -> Vec<Bar> {
    let bar = |m: &MethodResult| {
        let (value, text) = of(m)?;
        Some(Bar { label: m.kv.clone(), class: class(m), value, text })
    };
    comparison.methods.iter().filter_map(bar).collect()
}

fn divergence(comparison: &Comparison, page: &mut Page) {
    let list = method_bars(comparison, |m| {
        let d = m.divergence?;
        let (share, same) = (100.0 * d.share, 100.0 * d.same);
        Some((d.share, format!("{share:.0} % · {:.0} tokens · {same:.0} % same", d.tokens)))
    });
    if list.is_empty() {
        return;
    }
    page.section(
        "Long answers: how far they stay BF16's",
        "Mean share of a long greedy answer before the first token that is not BF16's; that position in tokens; and the share \
         of answers that are the same to the end.",
    );
    page.figures("", [bars("Long answers: share that is BF16's", &list)]);
}

fn memory(comparison: &Comparison, page: &mut Page) {
    let Some(&last) = comparison.contexts.last() else { return };
    page.section(
        "Memory",
        &format!("Cache of one sequence of {} tokens: pages, windows and metadata.", tokens(last)),
    );
    let list = method_bars(comparison, |m| {
        let size = m.size_at(last)?;
        Some((size.bytes as f64, format!("{} · {:.2} bits", bytes(size.bytes), size.bits)))
    });
    page.figures("", [bars("Memory", &list)]);
}

fn speed(comparison: &Comparison, page: &mut Page) {
    let list = method_bars(comparison, |m| {
        let s = m.speed?;
        let note = if m.dequantized { " · dequantized first" } else { "" };
        Some((s.ratio, format!("{:.2}× · {:.0} tokens/s{note}", s.ratio, s.tokens_per_s)))
    });
    if list.is_empty() {
        return;
    }
    page.section(
        "Decode speed against BF16 (noisy)",
        "One sequence, steps of all formats in turns, median. A format marked “dequantized first” has no kernel of its own here: \
         its pages are expanded to BF16 first, so its bar shows this program, not the method.",
    );
    page.figures("", [bars("Decode speed against BF16", &list)]);
}

fn methods(comparison: &Comparison, page: &mut Page) {
    page.push("<h2>How it was measured</h2>\n<ul>");
    comparison.notes.iter().for_each(|note| page.put(format_args!("<li>{}</li>", escape(note))));
    page.push("</ul>\n");
    let row =
        |m: &MethodResult| vec![m.kv.clone(), m.description.clone(), m.rotations.clone(), m.kernel.clone()];
    let rows = comparison.methods.iter().map(|m| (class(m), row(m)));
    page.table(&["kv", "what it is ", "rotations ", "kernel "], rows);
}

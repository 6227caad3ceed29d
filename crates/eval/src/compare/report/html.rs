//! The page.

use super::style::PAGE;
use super::svg::{Bar, bars, escape, heat_map, put};
use super::{accuracy_figure, bytes, class, kl_figure, tokens};
use crate::compare::{Comparison, MethodResult};
use crate::run::REFERENCE;

pub(super) fn page(comparison: &Comparison) -> String {
    let mut out = String::with_capacity(1 << 17);
    out.push_str("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    out.push_str("<title>KV-cache formats compared</title><style>");
    out.push_str(PAGE);
    put(
        &mut out,
        format_args!("</style></head><body>\n<h1>KV-cache formats on {}</h1>\n", escape(&comparison.model)),
    );
    put(
        &mut out,
        format_args!(
            "<p>{} · <code>{}</code></p>\n",
            escape(&comparison.device),
            escape(&comparison.command)
        ),
    );
    tiles(comparison, &mut out);
    fronts(comparison, &mut out);
    table(comparison, &mut out);
    tasks(comparison, &mut out);
    needles(comparison, &mut out);
    out.push_str("<div class=\"pair\">");
    for figure in [divergence, memory, speed] {
        out.push_str("<div>");
        figure(comparison, &mut out);
        out.push_str("</div>\n");
    }
    out.push_str("</div>\n");
    methods(comparison, &mut out);
    out.push_str("</body></html>\n");
    out
}

fn section(out: &mut String, title: &str, text: &str) {
    put(out, format_args!("<h2>{}</h2>\n<p>{}</p>\n", escape(title), escape(text)));
}

/// The headline: the best of ours at no more than 2.5 bits, or what there is.
fn tiles(comparison: &Comparison, out: &mut String) {
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
    out.push_str("<div class=\"tiles\">");
    for (value, label) in list {
        put(
            out,
            format_args!(
                "<div class=\"tile\"><b>{}</b><span>{}</span></div>",
                escape(&value),
                escape(&label)
            ),
        );
    }
    out.push_str("</div>\n");
}

fn fronts(comparison: &Comparison, out: &mut String) {
    section(
        out,
        "What a bit buys",
        "Each point is a format. The dashed line joins those that no other beats in both directions.",
    );
    out.push_str("<p class=\"key\"><i style=\"background:var(--ours)\"></i>OSCAR formats<i style=\"background:var(--theirs)\"></i>other methods<i style=\"background:var(--base)\"></i>BF16</p>");
    out.push_str("<div class=\"pair\">");
    for figure in [kl_figure(comparison), accuracy_figure(comparison)].into_iter().flatten() {
        put(out, format_args!("<div class=\"figure\">{}</div>", figure.render()));
    }
    out.push_str("</div>\n");
}

fn table(comparison: &Comparison, out: &mut String) {
    let last = comparison.contexts.last().copied().unwrap_or(0);
    section(
        out,
        "All numbers",
        &format!(
            "Accuracies in percent. Bits with windows and memory are of a sequence of {} tokens. Speed is decoding against \
             BF16, measured in turns on a machine that may be busy: read it as a hint.",
            tokens(last)
        ),
    );
    let (header, rows) = comparison.table();
    out.push_str("<div class=\"wide\"><table><tr>");
    header.iter().for_each(|h| put(out, format_args!("<th>{}</th>", escape(h.trim_end()))));
    out.push_str("</tr>");
    for (method, row) in comparison.methods.iter().zip(&rows) {
        put(out, format_args!("<tr class=\"{}\">", class(method)));
        row.iter().for_each(|cell| put(out, format_args!("<td>{}</td>", escape(cell))));
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}

fn tasks(comparison: &Comparison, out: &mut String) {
    let mut columns: Vec<(&str, usize, usize)> = Vec::new();
    for task in comparison.methods.iter().flat_map(|m| &m.tasks) {
        if !columns.iter().any(|c| (c.0, c.1) == (task.task.as_str(), task.context)) {
            columns.push((&task.task, task.context, task.n));
        }
    }
    if columns.is_empty() {
        return;
    }
    section(
        out,
        "Tasks",
        "Exact match of the whole greedy answer, in percent, by task, context and number of cases.",
    );
    out.push_str("<div class=\"wide\"><table><tr><th>kv</th>");
    for (task, context, n) in &columns {
        put(out, format_args!("<th>{}<br>{} · {n}</th>", escape(task), tokens(*context)));
    }
    out.push_str("</tr>");
    for method in &comparison.methods {
        put(out, format_args!("<tr class=\"{}\"><td>{}</td>", class(method), escape(&method.kv)));
        for (task, context, _) in &columns {
            let score = method.tasks.iter().find(|t| (t.task.as_str(), t.context) == (*task, *context));
            match score {
                Some(score) => put(out, format_args!("<td>{:.0}</td>", 100.0 * score.accuracy)),
                None => out.push_str("<td></td>"),
            }
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}

fn needles(comparison: &Comparison, out: &mut String) {
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
    section(
        out,
        "Needles by length and depth",
        "Share of magic numbers found, in percent: columns are context lengths, rows the depth at which the number stands \
         (RULER's wording, a needle at every depth, each asked for).",
    );
    let columns: Vec<String> = contexts.iter().map(|&c| tokens(c)).collect();
    let rows: Vec<String> = depths.iter().map(|d| format!("{:.0} %", 100.0 * d)).collect();
    out.push_str("<div class=\"maps\">");
    for method in comparison.methods.iter().filter(|m| !m.needles.is_empty()) {
        let cell = |r: usize, c: usize| {
            let found = method.needles.iter().find(|n| n.context == contexts[c] && n.depth == depths[r]);
            found.map(|n| n.accuracy)
        };
        put(out, format_args!("<div>{}</div>", heat_map(&method.kv, &columns, &rows, cell)));
    }
    out.push_str("</div>\n");
}

fn divergence(comparison: &Comparison, out: &mut String) {
    let list: Vec<Bar> = comparison
        .methods
        .iter()
        .filter_map(|m| {
            let d = m.divergence?;
            let text =
                format!("{:.0} % · {:.0} tokens · {:.0} % same", 100.0 * d.share, d.tokens, 100.0 * d.same);
            Some(Bar { label: m.kv.clone(), class: class(m), value: d.share, text })
        })
        .collect();
    if list.is_empty() {
        return;
    }
    section(
        out,
        "Long answers: how far they stay BF16's",
        "Mean share of a long greedy answer before the first token that is not BF16's; that position in tokens; and the share \
         of answers that are the same to the end.",
    );
    put(
        out,
        format_args!("<div class=\"figure\">{}</div>\n", bars("Long answers: share that is BF16's", &list)),
    );
}

fn memory(comparison: &Comparison, out: &mut String) {
    let Some(&last) = comparison.contexts.last() else { return };
    section(
        out,
        "Memory",
        &format!("Cache of one sequence of {} tokens: pages, windows and metadata.", tokens(last)),
    );
    let list: Vec<Bar> = comparison
        .methods
        .iter()
        .filter_map(|m| {
            let size = m.size_at(last)?;
            let text = format!("{} · {:.2} bits", bytes(size.bytes), size.bits);
            Some(Bar { label: m.kv.clone(), class: class(m), value: size.bytes as f64, text })
        })
        .collect();
    put(out, format_args!("<div class=\"figure\">{}</div>\n", bars("Memory", &list)));
}

fn speed(comparison: &Comparison, out: &mut String) {
    let list: Vec<Bar> = comparison
        .methods
        .iter()
        .filter_map(|m| {
            let s = m.speed?;
            let note = if m.generic { " · generic decode" } else { "" };
            let text = format!("{:.2}× · {:.0} tokens/s{note}", s.ratio, s.tokens_per_s);
            Some(Bar { label: m.kv.clone(), class: class(m), value: s.ratio, text })
        })
        .collect();
    if list.is_empty() {
        return;
    }
    section(
        out,
        "Decode speed against BF16 (noisy)",
        "One sequence, steps of all formats in turns, median. A format marked “generic decode” has no kernel of its own here: \
         its pages are expanded to BF16 first, so its bar shows this program, not the method.",
    );
    put(out, format_args!("<div class=\"figure\">{}</div>\n", bars("Decode speed against BF16", &list)));
}

fn methods(comparison: &Comparison, out: &mut String) {
    out.push_str("<h2>How it was measured</h2>\n<ul>");
    comparison.notes.iter().for_each(|note| put(out, format_args!("<li>{}</li>", escape(note))));
    out.push_str("</ul>\n<div class=\"wide\"><table><tr><th>kv</th><th class=\"text\">what it is</th><th class=\"text\">rotations</th><th class=\"text\">kernel</th></tr>");
    for m in &comparison.methods {
        put(out, format_args!("<tr class=\"{}\"><td>{}</td>", class(m), escape(&m.kv)));
        for text in [&m.description, &m.rotations, &m.kernel] {
            put(out, format_args!("<td class=\"text\">{}</td>", escape(text)));
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}

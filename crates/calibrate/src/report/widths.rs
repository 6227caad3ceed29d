//! The page's part on widths: where harm is, what each unit got, and what a mean costs.

use crate::bits::{BitPlan, Freedom, HarmMap, WidthTable, solve};
use oscar_codec::MeanBits;
use oscar_figures::{HeatMap, LineChart, Page, Series};
use serde_json::{Value, json};

/// Steps of the mean in the curve, in bits.
const STEP: f64 = 0.05;

pub(super) fn widths(plan: &BitPlan, head_dim: usize, page: &mut Page) {
    if let Some(map) = &plan.harm {
        harm_maps(map, &plan.layers, page);
    }
    for (mean, table) in &plan.tables {
        tables(*mean, table, &plan.layers, page);
    }
    if let Some(map) = &plan.harm {
        curve(map, head_dim, page);
    }
}

fn harm_maps(map: &HarmMap, layers: &[usize], page: &mut Page) {
    page.section(
        "Harm",
        "What coding one unit alone at two bits does to the model's predictions on text and on answers, everything else \
         exact; 100 is what two bits everywhere do. Rows are layers, columns KV heads.",
    );
    let percent = |unit: usize| 100.0 * f64::from(map.harm[unit][1]);
    let highest = (0..map.units()).map(percent).fold(0.0, f64::max);
    sides(page, layers, map.kv_heads, highest, |side| {
        (0..map.units() / 2).map(|head| percent(2 * head + side)).collect()
    });
}

fn tables(mean: MeanBits, table: &WidthTable, layers: &[usize], page: &mut Page) {
    page.section(
        &format!("Widths at {mean} bits"),
        "Bits of each code, chosen for the least harm at this mean and verified in the whole model; 0 for heads that keep \
         no history. Rows are layers, columns KV heads.",
    );
    sides(page, layers, table.kv_heads, 4.0, |side| {
        table.units().into_iter().skip(side).step_by(2).map(f64::from).collect()
    });
}

/// A heat map for the keys and one for the values.
fn sides(
    page: &mut Page,
    layers: &[usize],
    kv_heads: usize,
    highest: f64,
    values: impl Fn(usize) -> Vec<f64>,
) {
    let titles = ["keys", "values"].into_iter().enumerate();
    let map = |(side, title)| {
        let rows = layers.iter().map(usize::to_string).collect();
        HeatMap { rows, ..HeatMap::numbered(title, kv_heads, values(side), highest) }.figure()
    };
    page.figures("small", titles.map(map));
}

/// Means that heads of this size can have, with the harm of the best tables: by head, by layer,
/// uniform.
fn means(map: &HarmMap, head_dim: usize) -> Vec<(f64, f64, f64)> {
    let by_head = Freedom::default();
    let by_layer = Freedom { by_layer: true, ..Freedom::default() };
    let mut all = Vec::new();
    let mut bits = MeanBits::LEAST.bits();
    while bits <= MeanBits::MOST.bits() + 1e-9 {
        let mean = format!("{bits:.2}").parse::<MeanBits>();
        let solved = mean.ok().and_then(|mean| {
            Some((solve(map, mean, head_dim, &by_head).ok()?, solve(map, mean, head_dim, &by_layer).ok()?))
        });
        if let Some((head, layer)) = solved {
            all.push((bits, map.total(&head), map.total(&layer)));
        }
        bits += STEP;
    }
    all
}

fn curve(map: &HarmMap, head_dim: usize, page: &mut Page) {
    page.section(
        "Harm against size",
        "Sum of single harms of the best table at each mean, logarithmic: blue by head, orange by layer; grey is the same \
         width everywhere.",
    );
    let solved = means(map, head_dim);
    let overhead = 32.0 / head_dim as f64;
    let uniform = (1..=4u32)
        .map(|w| (f64::from(w) + overhead, map.total(&WidthTable::uniform(map.layers, map.kv_heads, w))));
    let chart = LineChart {
        title: "harm against size",
        x_label: "bits an element",
        y_label: "harm",
        logarithmic: true,
        width: 960.0,
        height: 260.0,
        series: vec![
            Series { class: "base", points: uniform.collect() },
            Series {
                class: "theirs",
                points: solved.iter().map(|&(bits, _, layer)| (bits, layer)).collect(),
            },
            Series { class: "ours", points: solved.iter().map(|&(bits, head, _)| (bits, head)).collect() },
        ],
    };
    page.put(format_args!("{}\n", chart.figure().inline()));
}

/// The same facts for programs.
pub(super) fn to_json(plan: &BitPlan) -> Value {
    let tables: Vec<Value> = plan
        .tables
        .iter()
        .map(|(mean, table)| json!({"bits": mean.bits(), "layers": table.layers, "kv_heads": table.kv_heads, "widths": table.widths}))
        .collect();
    let harm = plan.harm.as_ref();
    json!({"layers": plan.layers, "tables": tables, "harm": harm.map(|map| &map.harm), "harm_absent": harm.map(|map| &map.absent)})
}

//! Checks of the choice of tokens on the device: the same tokens, logits and order as the scalar
//! rule, bit for bit, for any row.

use crate::{Extent, Numbers, Report, download, upload, without_cache};
use anyhow::Result;
use oscar_backend::{
    Backend, Candidate, HostMatrix, HostValues, MOST_CANDIDATES, Output, Pick, Product, Step, TokenMask, pick,
};

/// Sizes of vocabularies: the smallest, an odd one, one that is whole slices, real ones.
const WIDTHS: [usize; 6] = [1, 7, 255, 4096, 32003, 151_936];

pub fn check<B: Backend>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(31);
    for width in WIDTHS.into_iter().filter(|&width| extent.fits(width, 4096)) {
        let rows = adversarial(&mut numbers, width);
        let values: Vec<f32> = rows.iter().flat_map(|(_, row)| row.iter().copied()).collect();
        let logits = upload(gpu, &values, width)?;
        let names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
        compare(gpu, &logits, width, &names, &mut numbers, report)?;
    }
    // Logits as a model makes them: sums in f32, no two alike.
    for width in [4096, 151_936].into_iter().filter(|&width| extent.fits(width, 4096)) {
        let (inputs, rows) = (64, 9);
        let weights = numbers.vector(width * inputs);
        let matrix =
            gpu.matrix(HostMatrix { outputs: width, inputs, values: HostValues::F32(&weights), bias: None })?;
        let x = upload(gpu, &numbers.vector(rows * inputs), inputs)?;
        let mut logits = gpu.rows(width);
        without_cache(gpu, |step| {
            Ok(step.product(Product::of(&matrix, Output::Logits), &x, &mut logits)?)
        })?;
        compare(gpu, &logits, width, &["a model's"; 9], &mut numbers, report)?;
    }
    Ok(())
}

/// Rows that tempt a search into a wrong answer; all values are exact in BF16.
fn adversarial(numbers: &mut Numbers, width: usize) -> Vec<(&'static str, Vec<f32>)> {
    let mut row = |name, f: &mut dyn FnMut(usize, f32) -> f32| {
        (name, (0..width).map(|i| f(i, numbers.unit())).collect::<Vec<f32>>())
    };
    let (last, middle) = (width - 1, width / 2);
    vec![
        row("random", &mut |_, x| x * 8.0),
        row("few levels", &mut |_, x| (x * 3.0).round()),
        row("zeros of both signs", &mut |_, x| if x < 0.0 { -0.0 } else { 0.0 }),
        row("all alike", &mut |_, _| -2.5),
        row("falling", &mut |i, _| -(i as f32 / 256.0).floor()),
        row("one huge, last", &mut |i, x| if i == last { 1e30 } else { x }),
        row("two huge", &mut |i, x| if i == last || i == middle { f32::MAX } else { x }),
        row("infinities", &mut |i, x| if i % 5 == 3 { f32::INFINITY } else { x }),
        row("mostly minus infinity", &mut |i, x| if i % 97 == 13 { x } else { f32::NEG_INFINITY }),
        row("minus infinity alone", &mut |_, _| f32::NEG_INFINITY),
        row("mostly NaN", &mut |i, x| if i % 89 == 6 { x } else { f32::NAN }),
        row("NaN alone", &mut |_, _| f32::NAN),
        row("NaN first and last", &mut |i, x| if i == 0 || i == last { -f32::NAN } else { x }),
        row("NaN and minus infinity", &mut |i, _| if i % 2 == 0 { f32::NAN } else { f32::NEG_INFINITY }),
        row("tiny", &mut |_, x| half::bf16::from_f32(x * 1e-38).to_f32()),
        row("negative", &mut |_, x| -1.0 - x.abs() * 1000.0),
    ]
}

fn compare<B: Backend>(
    gpu: &B,
    logits: &B::Rows,
    width: usize,
    names: &[&str],
    numbers: &mut Numbers,
    report: &mut Report,
) -> Result<()> {
    let values = download(gpu, logits, names.len())?;
    let rows: Vec<&[f32]> = values.chunks_exact(width).collect();
    let masks = masks(numbers, width);
    let greedy: Vec<(usize, Pick)> = (0..rows.len()).map(|row| (row, Pick::Greedy)).collect();
    let lists = |counts: &[usize]| -> Vec<(usize, Pick)> {
        let of_row = |row| counts.iter().map(move |&count| (row, Pick::Top(count)));
        (0..rows.len()).flat_map(of_row).collect()
    };
    // Everything at once, in no order; then each kind by itself, and one alone.
    let mut mixed = lists(&[1, 2, 20, 255, MOST_CANDIDATES]);
    mixed.extend_from_slice(&greedy);
    let among = |what: Pick<'static>, row: usize| (row, what.among(&masks[row % masks.len()]));
    let masked: Vec<(usize, Pick)> =
        (0..rows.len()).flat_map(|row| [among(Pick::Greedy, row), among(Pick::Top(40), row)]).collect();
    mixed.extend_from_slice(&masked);
    for i in (1..mixed.len()).rev() {
        mixed.swap(i, numbers.below(i + 1));
    }
    for picks in [mixed, greedy.clone(), lists(&[50]), masked, vec![greedy[rows.len() - 1]]] {
        let mut found = Vec::new();
        without_cache(gpu, |step| Ok(step.pick(logits, &picks, &mut found)?))?;
        report.case("picks, lists that came", picks.len().abs_diff(found.len()) as f64, 0.0, || {
            format!("{} of {} for a vocabulary of {width}", found.len(), picks.len())
        });
        for ((row, what), found) in picks.iter().zip(&found) {
            let expected = pick(rows[*row], *what);
            let name = match what {
                Pick::Greedy => "picks, greedy",
                Pick::Top(_) => "picks, top",
                Pick::GreedyAmong(_) => "picks, greedy among allowed tokens",
                Pick::TopAmong(..) => "picks, top among allowed tokens",
            };
            report.case(name, differing(&expected, found) as f64, 0.0, || {
                format!("{what:?} of row '{}', vocabulary of {width}", names[*row])
            });
        }
    }
    Ok(())
}

/// Masks that allow half of the tokens, few, none, one beyond the vocabulary, and all; one is too short.
fn masks(numbers: &mut Numbers, width: usize) -> Vec<TokenMask> {
    let words = width.div_ceil(32);
    let mut random = |sparse: usize| -> Vec<u32> {
        (0..words)
            .map(|_| if numbers.below(sparse) == 0 { numbers.below(1 << 32) as u32 } else { 0 })
            .collect()
    };
    let (half, few) = (random(1), random(50));
    let short = half[..words / 2].to_vec();
    let mut beyond = vec![0; words + 1];
    beyond[words] = 1;
    [half, few, vec![0; words], beyond, vec![u32::MAX; words], short]
        .into_iter()
        .map(|words| {
            let mask = TokenMask::default();
            mask.set(words);
            mask
        })
        .collect()
}

/// Candidates that are not the same, to the bit.
fn differing(expected: &[Candidate], found: &[Candidate]) -> usize {
    let same = |(a, b): &(&Candidate, &Candidate)| a.0.to_bits() == b.0.to_bits() && a.1 == b.1;
    expected.len().max(found.len()) - expected.iter().zip(found).filter(same).count()
}

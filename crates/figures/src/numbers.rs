//! Ranges, ticks and numbers in few characters.

/// Smallest and largest value with room on both sides: a share of their distance, at least `least`.
/// Never equal.
pub(crate) fn padded(values: impl Iterator<Item = f64>, share: f64, least: f64) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let room = ((high - low) * share).max(least);
    let room = if high - low + room < 1e-12 { 0.5 } else { room };
    (low - room, high + room)
}

/// Four to nine round numbers inside the span.
pub(crate) fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|&s| s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|&t| t <= high).take(12).collect()
}

/// A number in few characters.
pub fn number(value: f64) -> String {
    let size = value.abs();
    let text = if size >= 100.0 || size == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.01 {
        format!("{value:.2}")
    } else {
        return format!("{value:.0e}");
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A tick of a logarithmic axis: a power of ten as such, anything between two of them as the number
/// it is.
pub(crate) fn power(exponent: f64) -> String {
    match exponent.fract().abs() < 1e-9 {
        true => format!("1e{exponent:.0}"),
        false => number(10f64.powf(exponent)),
    }
}

/// A small number without an exponent where that is readable.
pub fn cost(value: f64) -> String {
    match value {
        _ if value >= 0.1 => format!("{value:.2}"),
        _ if value >= 0.01 => format!("{value:.3}"),
        _ if value >= 0.001 => format!("{value:.4}"),
        _ if value >= 0.00009 => format!("{value:.5}"),
        _ => format!("{value:.0e}"),
    }
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(-3.0, 2.0), [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]);
        for (low, high) in [(0.1, 0.2), (1e-9, 1e-8), (12345.0, 99999.0)] {
            let ticks = ticks(low, high);
            assert!((3..=12).contains(&ticks.len()) && ticks.iter().all(|t| (low..=high).contains(t)));
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, 0.5, 12.0, 123.4, 0.001].map(number), ["0", "0.5", "12", "123", "1e-3"]);
        assert_eq!([-3.0, 0.0, 1.0, -0.8, -2.5].map(power), ["1e-3", "1e0", "1e1", "0.16", "3e-3"]);
        assert_eq!(
            [0.5, 0.0123, 0.00456, 0.00065, 0.00001].map(cost),
            ["0.50", "0.012", "0.0046", "0.00065", "1e-5"]
        );
    }

    #[test]
    fn ranges_are_never_empty() {
        for values in [vec![], vec![3.0], vec![1.0, 2.0]] {
            let (low, high) = padded(values.iter().copied(), 0.05, 0.0);
            assert!(low < high && values.iter().all(|v| (low..=high).contains(v)));
        }
        assert_eq!(padded([1.0, 1.0].into_iter(), 0.1, 0.04), (0.96, 1.04));
    }
}

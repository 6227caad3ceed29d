//! Divergences by kind of probe, and when one cache is worse than another.

use oscar_backend::Divergence;
use std::collections::BTreeMap;

/// What one probe says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ProbeScore {
    /// Mean over positions.
    divergence: f64,
    /// Share of positions with another most likely token.
    changed: f64,
}

/// Mean divergences of probes, by group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores(BTreeMap<String, Vec<ProbeScore>>);

/// One group of probes, averaged.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupScore<'a> {
    pub name: &'a str,
    /// Mean divergence in nats.
    pub divergence: f64,
    /// Its standard error over probes; 0 for a single probe.
    pub error: f64,
    /// Share of positions with another most likely token.
    pub changed: f64,
}

impl Scores {
    pub(super) fn add(&mut self, group: &str, found: &[Divergence]) {
        let n = found.len().max(1) as f64;
        self.0.entry(group.to_owned()).or_default().push(ProbeScore {
            divergence: found.iter().map(|d| d.kl).sum::<f64>() / n,
            changed: found.iter().filter(|d| !d.agrees).count() as f64 / n,
        });
    }

    pub fn groups(&self) -> impl Iterator<Item = GroupScore<'_>> {
        self.0.iter().map(|(name, probes)| {
            let divergences: Vec<f64> = probes.iter().map(|p| p.divergence).collect();
            let (divergence, error) = mean_and_error(&divergences);
            let changed = probes.iter().map(|p| p.changed).sum::<f64>() / probes.len().max(1) as f64;
            GroupScore { name, divergence, error, changed }
        })
    }

    /// The divergences of all groups in one figure, relative to a yardstick's: one is as harmful as
    /// the yardstick.
    pub fn relative_to(&self, yardstick: &Self) -> f64 {
        self.weighed(yardstick, &[])
    }

    /// The same with some groups counting more.
    pub(super) fn weighed(&self, yardstick: &Self, more: &[(String, f64)]) -> f64 {
        let weights = group_weights(yardstick.groups().map(|g| (g.name, g.divergence)));
        let factor = |name: &str| more.iter().find(|(group, _)| group == name).map_or(1.0, |(_, f)| *f);
        self.groups().zip(weights).map(|(group, weight)| group.divergence * weight * factor(group.name)).sum()
    }

    /// The groups on which this cache is worse than a safer one, the worst first, with both
    /// divergences. Noise and differences that nobody would notice do not count.
    pub fn worse_than(&self, safer: &Self) -> Vec<Worse> {
        let least = LEAST_YARDSTICK * safer.groups().map(|g| g.divergence).fold(0.0, f64::max);
        let mut worse: Vec<Worse> = self
            .groups()
            .zip(safer.groups())
            .filter(|(own, other)| {
                own.divergence > least.max(VISIBLE)
                    && (own.divergence > MOST_EXCESS * other.divergence + least
                        || own.changed > MOST_EXCESS * other.changed + LEAST_CHANGED)
            })
            .map(|(own, other)| Worse {
                group: own.name.to_owned(),
                divergence: own.divergence,
                safer: other.divergence,
                changed: own.changed,
                safer_changed: other.changed,
            })
            .collect();
        worse.sort_by(|a, b| (b.divergence / b.safer).total_cmp(&(a.divergence / a.safer)));
        worse
    }

    /// The groups whose answers this cache breaks. A safer neighbour may break them as well: to be no
    /// worse than it is not enough.
    pub fn broken(&self) -> Vec<Broken> {
        let limit = |name: &str| match name {
            name if name == "text" || name.starts_with("echo") => BROKEN_TEXT,
            _ => BROKEN,
        };
        let broken = self.groups().filter(|g| g.divergence > limit(g.name));
        broken
            .map(|g| Broken { group: g.name.to_owned(), divergence: g.divergence, changed: g.changed })
            .collect()
    }
}

/// A group whose answers a cache does not survive, whatever a safer one does.
#[derive(Clone, Debug, PartialEq)]
pub struct Broken {
    pub group: String,
    pub divergence: f64,
    pub changed: f64,
}

/// Mean divergence from which the answers of a task break: uniform two-bit codes at .028 copied no
/// line right, a table at .058 added up no column.
const BROKEN: f64 = 0.02;
/// The same of text and of repeated passages, which no single token decides.
const BROKEN_TEXT: f64 = 0.05;

/// A group on which a cache is worse than a safer one.
#[derive(Clone, Debug, PartialEq)]
pub struct Worse {
    pub group: String,
    pub divergence: f64,
    pub safer: f64,
    pub changed: f64,
    pub safer_changed: f64,
}

/// Factor above the safer cache from which a group counts as worse.
const MOST_EXCESS: f64 = 1.25;
/// Mean divergence below which no group counts as worse: tokens then change only where two are as
/// likely.
const VISIBLE: f64 = 0.001;
/// Share of changed tokens that does not count.
const LEAST_CHANGED: f64 = 0.02;
/// Share of the largest group's yardstick below which no group's is used.
const LEAST_YARDSTICK: f64 = 0.1;

/// How much a kind of probe counts. Text stands for everything that has no probe of its own; the
/// distances of `echo` count as one kind.
fn importance(group: &str) -> f64 {
    match group {
        "text" => 3.0,
        name if name.starts_with("echo") => 1.0 / 3.0,
        _ => 1.0,
    }
}

/// The weight of each group's divergence, so that the yardstick's add up to one. Divergences are
/// measured in the group's own under the yardstick, so that kinds of probes count alike whatever
/// their scale, but in no less than a share of the largest: a group that the yardstick hardly moves
/// is one on which codes do no visible harm, and divided by so little, its noise would weigh as much
/// as the others' harm.
pub(super) fn group_weights<'a>(yardsticks: impl Iterator<Item = (&'a str, f64)>) -> Vec<f64> {
    let own: Vec<(&str, f64)> = yardsticks.collect();
    let least = LEAST_YARDSTICK * own.iter().map(|(_, y)| *y).fold(0.0, f64::max);
    // Where nothing moves at all, any unit will do.
    let units: Vec<f64> = own.iter().map(|(group, y)| y.max(least).max(1e-12) / importance(group)).collect();
    let total: f64 = own.iter().zip(&units).map(|((_, y), unit)| y / unit).sum();
    units.into_iter().map(|unit| 1.0 / (unit * total.max(1e-12))).collect()
}

/// Mean of some values and its standard error.
pub(super) fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, 0.0);
    }
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (variance / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(groups: &[(&str, f64, bool)]) -> Scores {
        let mut scores = Scores::default();
        for &(group, kl, agrees) in groups {
            scores.add(group, &[Divergence { kl, agrees }, Divergence { kl, agrees: true }]);
        }
        scores
    }

    #[test]
    fn a_yardstick_that_hardly_moves_does_not_make_noise_into_harm() {
        let yardsticks = [("copy", 0.008), ("memory", 0.004), ("sort", 2e-5), ("vt", 0.0)];
        let weights = group_weights(yardsticks.into_iter());
        let total: f64 = yardsticks.iter().zip(&weights).map(|((_, y), w)| y * w).sum();
        assert!((total - 1.0).abs() < 1e-9, "the yardstick is one: {total}");
        assert!((weights[1] / weights[0] - 2.0).abs() < 1e-9, "kinds that move count alike");
        // Both are measured in a tenth of the largest.
        assert!((weights[2] / weights[0] - 10.0).abs() < 1e-9 && weights[3] == weights[2], "{weights:?}");
        assert!(group_weights([("a", 0.0), ("b", 0.0)].into_iter()).iter().all(|w| w.is_finite()));
    }

    #[test]
    fn a_collapse_on_one_kind_is_found_and_noise_is_not() {
        let uniform = scores(&[("text", 0.01, true), ("copy", 0.02, true), ("running_sum", 0.007, true)]);
        assert_eq!(uniform.worse_than(&uniform), []);
        let better = scores(&[("text", 0.004, true), ("copy", 0.01, true), ("running_sum", 0.009, true)]);
        assert_eq!(better.worse_than(&uniform), [], "a little more where little is lost is noise");
        let table = scores(&[("text", 0.008, true), ("copy", 0.01, true), ("running_sum", 0.058, true)]);
        let worse = table.worse_than(&uniform);
        assert_eq!(worse.len(), 1);
        assert_eq!(
            (worse[0].group.as_str(), worse[0].divergence, worse[0].safer),
            ("running_sum", 0.058, 0.007)
        );
        let other = scores(&[("text", 0.004, true), ("copy", 0.01, false), ("running_sum", 0.004, true)]);
        assert_eq!(other.worse_than(&uniform)[0].group, "copy", "changed tokens count too");
        let tiny = scores(&[("text", 1e-5, true), ("copy", 1e-5, true), ("running_sum", 0.0, true)]);
        let invisible = scores(&[("text", 4e-4, true), ("copy", 2e-4, false), ("running_sum", 1e-4, true)]);
        assert_eq!(invisible.worse_than(&tiny), [], "nobody would see the difference");
    }

    #[test]
    fn answers_break_where_text_does_not() {
        let found = scores(&[("text", 0.04, true), ("copy", 0.04, true), ("echo_far", 0.2, false)]);
        let broken: Vec<String> = found.broken().into_iter().map(|b| b.group).collect();
        assert_eq!(broken, ["copy", "echo_far"]);
        assert_eq!(scores(&[("text", 0.04, true), ("copy", 0.02, true)]).broken(), []);
    }

    #[test]
    fn errors_are_those_of_a_mean() {
        assert_eq!(mean_and_error(&[]), (0.0, 0.0));
        assert_eq!(mean_and_error(&[2.0]), (2.0, 0.0));
        assert_eq!(mean_and_error(&[1.0, 3.0]), (2.0, 1.0));
    }
}

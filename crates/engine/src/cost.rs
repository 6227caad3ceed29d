//! What a step costs, learned from the steps before it.
//!
//! The time of a step is modelled as `fixed + row · rows + pair · pairs`: products and normalizations
//! go with the rows, attention with the pairs of a row and a position that it reads. The three
//! coefficients are the non-negative least-squares fit of recent steps; old steps fade.
//!
//! A GPU attends to prompts in waves: a last wave that is not full takes as long as a full one. So the
//! rows of a prompt count as whole waves in its pairs, and a step is best a number of whole waves.
//!
//! The fit may come from the long steps of a prompt alone, which are more efficient. So the prediction for
//! a step beside decoding sequences is multiplied by how much longer than predicted such steps lately took.
//!
//! Only steps with prompts teach: a long time of decoding alone does not make the model forget what
//! prompts cost, and the time of decoded rows, which read memory, is no guide to that of prompts.
//!
//! **Invariant:** no clock here. The worker measures; the scheduler asks.

use oscar_backend::PrefillWave;

/// Coefficients in seconds. All of them are finite and not negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    pub fixed: f64,
    pub row: f64,
    pub pair: f64,
}

impl StepCost {
    /// Seconds that `tokens` rows of one sequence add, the first at position `start`.
    pub fn rows(&self, start: usize, tokens: usize, wave: PrefillWave) -> f64 {
        self.row * tokens as f64 + self.pair * pairs(start, tokens, wave)
    }

    /// The most tokens from `start` on that take at most `seconds`: whole blocks if the device divides
    /// the attention of so few, else whole waves if one fits. Of a single wave it takes the part that
    /// fits; if that is less than a quarter, the wave: attention takes as long for either.
    pub fn tokens_within(&self, seconds: f64, start: usize, wave: PrefillWave) -> usize {
        let tokens = self.rows_within(seconds, start);
        if wave == PrefillWave::NONE || seconds <= 0.0 {
            return tokens;
        }
        if wave.takes_parts(tokens) {
            return tokens / wave.block.max(1) * wave.block.max(1);
        }
        let one = wave.filling(1).max(1);
        if tokens >= one {
            // Whole waves cost what their rows cost, or a little more: the last block is not full.
            let fits = |&n: &usize| self.rows(start, n, wave) <= seconds;
            let waves = (1..=tokens / one).rev().map(|waves| wave.filling(waves));
            return waves.into_iter().find(fits).unwrap_or(one);
        }
        // row n + pair wave (start + (n + 1) / 2) = seconds, solved for n.
        let attention = self.pair * wave.tokens as f64;
        let left = seconds - attention * (start as f64 + 0.5);
        let part = (left / (self.row + attention / 2.0)).max(0.0) as usize;
        if part < one / 4 { one } else { part.min(one) }
    }

    /// [`StepCost::tokens_within`] for a device without waves.
    fn rows_within(&self, seconds: f64, start: usize) -> usize {
        // row n + pair (n start + n (n + 1) / 2) = seconds, solved for n.
        let (a, b) = (self.pair / 2.0, self.row + self.pair * (start as f64 + 0.5));
        if seconds <= 0.0 {
            return 0;
        }
        let n = if a * seconds > 1e-12 * b * b {
            ((b * b + 4.0 * a * seconds).sqrt() - b) / (2.0 * a)
        } else if b > 0.0 {
            seconds / b
        } else {
            return usize::MAX;
        };
        // Float to integer conversion saturates.
        n as usize
    }
}

/// Positions that `tokens` rows read together, the first at position `start`; rows of a prompt count as
/// whole waves. A single row is decoded, which knows no waves.
pub fn pairs(start: usize, tokens: usize, wave: PrefillWave) -> f64 {
    let rows = if tokens > 1 { wave.occupied(tokens) } else { tokens };
    rows as f64 * (start as f64 + (tokens as f64 + 1.0) / 2.0)
}

/// Fits a [`StepCost`] to measured steps.
#[derive(Clone, Debug, Default)]
pub struct CostModel {
    /// Sums of products of the features (1, rows, pairs), and of features with times.
    normal: [[f64; 3]; 3],
    times: [f64; 3],
    steps: usize,
    cost: StepCost,
    /// How many times longer than predicted steps beside decoding took, if there was one.
    excess: Option<f64>,
}

impl CostModel {
    /// Units that bring the features of usual steps to about one.
    const UNITS: [f64; 3] = [1.0, 256.0, 1e6];
    /// What a step still counts after the next one.
    const KEPT: f64 = 0.98;
    /// Steps before the fit is used.
    const LEAST_STEPS: usize = 4;
    /// Sweeps of coordinate descent; each is three divisions.
    const SWEEPS: usize = 50;

    /// [`CostModel::excess`] before the first such step, and at most.
    const CAUTION: f64 = 1.3;
    const MOST_EXCESS: f64 = 2.0;
    /// Share by which a shorter step lowers it. A longer one raises it at once.
    const CALMING: f64 = 0.1;

    /// A step with prompts, of `rows` rows that read `pairs` positions, took `seconds`. `beside`: other
    /// sequences decoded in it.
    pub fn observe(&mut self, rows: usize, pairs: f64, seconds: f64, beside: bool) {
        if !(seconds.is_finite() && seconds >= 0.0) {
            return;
        }
        if let (true, Some(cost)) = (beside, self.cost()) {
            let ratio = seconds / (cost.fixed + cost.row * rows as f64 + cost.pair * pairs).max(1e-9);
            let last = self.excess.unwrap_or(Self::CAUTION);
            let next = if ratio > last { ratio } else { last + Self::CALMING * (ratio - last) };
            self.excess = Some(next.clamp(1.0, Self::MOST_EXCESS));
        }
        let features = [1.0, rows as f64 / Self::UNITS[1], pairs / Self::UNITS[2]];
        // Relative errors matter: a slow step must not drown the fast ones.
        let weight = 1.0 / seconds.max(1e-4).powi(2);
        for i in 0..3 {
            for j in 0..3 {
                self.normal[i][j] = Self::KEPT * self.normal[i][j] + weight * features[i] * features[j];
            }
            self.times[i] = Self::KEPT * self.times[i] + weight * features[i] * seconds;
        }
        self.steps += 1;
        self.solve();
    }

    /// The fit, once there are enough steps for one.
    pub fn cost(&self) -> Option<StepCost> {
        (self.steps >= Self::LEAST_STEPS).then_some(self.cost)
    }

    /// The cost of steps beside sequences that decode.
    pub fn beside(&self) -> Option<StepCost> {
        let excess = self.excess.unwrap_or(Self::CAUTION);
        let scaled = |cost: StepCost| StepCost {
            fixed: excess * cost.fixed,
            row: excess * cost.row,
            pair: excess * cost.pair,
        };
        self.cost().map(scaled)
    }

    fn solve(&mut self) {
        let cost = &self.cost;
        let mut x = [cost.fixed, cost.row * Self::UNITS[1], cost.pair * Self::UNITS[2]];
        for _ in 0..Self::SWEEPS {
            for i in 0..3 {
                let others: f64 = (0..3).filter(|&j| j != i).map(|j| self.normal[i][j] * x[j]).sum();
                if self.normal[i][i] > 0.0 {
                    x[i] = ((self.times[i] - others) / self.normal[i][i]).max(0.0);
                }
            }
        }
        self.cost = StepCost { fixed: x[0], row: x[1] / Self::UNITS[1], pair: x[2] / Self::UNITS[2] };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: PrefillWave = PrefillWave::NONE;
    const WAVE: PrefillWave = PrefillWave { tokens: 792, block: 48, divides: false };
    const TRUE: StepCost = StepCost { fixed: 4e-3, row: 2e-5, pair: 3e-10 };

    fn time_of(start: usize, tokens: usize) -> f64 {
        TRUE.fixed + TRUE.rows(start, tokens, NONE)
    }

    #[test]
    fn a_model_learns_the_cost_of_its_steps() {
        let mut model = CostModel::default();
        assert_eq!(model.cost(), None, "nothing was measured");
        for i in 0..400 {
            // Prompts of several lengths, and steps of decoding between them.
            let (start, tokens) =
                [(0, 2048), (60_000, 900), (8_000, 1), (30_000, 2_000), (98_000, 500)][i % 5];
            model.observe(tokens, pairs(start, tokens, NONE), time_of(start, tokens), false);
        }
        let cost = model.cost().unwrap();
        for (start, tokens) in [(0, 4096), (50_000, 1024), (90_000, 256), (1_000, 1)] {
            let (predicted, real) = (cost.fixed + cost.rows(start, tokens, NONE), time_of(start, tokens));
            assert!((predicted / real - 1.0).abs() < 0.1, "{start} + {tokens}: {predicted} against {real}");
        }
    }

    #[test]
    fn tokens_within_a_time_take_at_most_that_time_and_one_more_takes_more() {
        for start in [0, 100, 10_000, 1_000_000] {
            for seconds in [1e-4, 1e-2, 0.08, 3.0] {
                let tokens = TRUE.tokens_within(seconds, start, NONE);
                assert!(TRUE.rows(start, tokens, NONE) <= seconds * 1.000_001, "{start} {seconds}");
                assert!(TRUE.rows(start, tokens + 1, NONE) > seconds * 0.999_999, "{start} {seconds}");
            }
        }
        assert_eq!(TRUE.tokens_within(-1.0, 0, NONE), 0);
        assert_eq!(StepCost::default().tokens_within(1.0, 0, NONE), usize::MAX, "a step that costs nothing");
        let only_rows = StepCost { fixed: 0.0, row: 1e-3, pair: 0.0 };
        assert_eq!(only_rows.tokens_within(0.5, 7, NONE), 500);
    }

    #[test]
    fn a_model_follows_a_device_that_slows_down_and_ignores_nonsense() {
        let mut model = CostModel::default();
        for (factor, steps) in [(1.0, 100), (3.0, 300)] {
            for i in 0..steps {
                let tokens = [1, 512, 64][i % 3];
                let seconds = factor * time_of(2_000, tokens);
                model.observe(tokens, pairs(2_000, tokens, NONE), seconds, false);
            }
        }
        model.observe(10, 10.0, f64::NAN, true);
        model.observe(10, 10.0, -1.0, true);
        let cost = model.cost().unwrap();
        let ratio = (cost.fixed + cost.rows(2_000, 512, NONE)) / time_of(2_000, 512);
        assert!((ratio - 3.0).abs() < 0.3, "{ratio}");
        assert!(cost.fixed >= 0.0 && cost.row >= 0.0 && cost.pair >= 0.0);
    }

    #[test]
    fn steps_beside_decoding_are_predicted_with_caution_and_by_what_they_took() {
        let mut model = CostModel::default();
        let mut observe = |factor: f64, beside: bool, times: usize| {
            for i in 0..times {
                let (start, tokens) = [(0, 2048), (30_000, 900), (60_000, 500)][i % 3];
                let seconds = factor * time_of(start, tokens);
                model.observe(tokens, pairs(start, tokens, NONE), seconds, beside);
            }
            model
                .beside()
                .map_or(0.0, |cost| (cost.fixed + cost.rows(9_000, 700, NONE)) / time_of(9_000, 700))
        };
        let ratio = observe(1.0, false, 30);
        assert!((1.25..1.35).contains(&ratio), "none was seen: {ratio}");
        assert!(observe(1.0, true, 40) < 1.02, "as predicted");
        assert!(observe(1.5, true, 1) > 1.4, "one step took longer");
        assert!(observe(1.0, true, 60) < 1.1, "it was the only one");
        assert!(observe(50.0, true, 1) < 8.0, "a step that hung");
    }

    #[test]
    fn a_part_of_a_wave_that_divides_its_context_takes_what_fits() {
        let cost = StepCost { fixed: 0.0, row: 2.1e-5, pair: 8.6e-10 };
        let wave = PrefillWave { divides: true, ..WAVE };
        for start in [70_000, 100_000, 200_000] {
            let tokens = cost.tokens_within(0.072, start, wave);
            assert!(tokens.is_multiple_of(48) && tokens > 0, "{tokens} at {start}");
            assert!(cost.rows(start, tokens, wave) <= 0.072 * 1.001, "{tokens} at {start}");
            assert!(cost.rows(start, tokens + 49, wave) > 0.072, "{tokens} at {start}: more fits");
        }
    }

    #[test]
    fn a_step_is_whole_waves_while_these_fit_and_a_part_of_one_beyond() {
        let cost = StepCost { fixed: 0.0, row: 2.1e-5, pair: 8.6e-10 };
        let mut last = usize::MAX;
        for start in [0, 10_000, 30_000, 60_000, 80_000, 90_000] {
            let tokens = cost.tokens_within(0.072, start, WAVE);
            assert!(cost.rows(start, tokens, WAVE) <= 0.072 * 1.001, "{tokens} at {start}");
            let whole = WAVE.filling(WAVE.needed(tokens)) == tokens;
            assert!(whole || (192..768).contains(&tokens), "{tokens} at {start}");
            assert!(tokens <= last, "{tokens} at {start}");
            last = tokens;
        }
        assert!(last < 768, "near the end a whole wave takes too long");
        assert_eq!(cost.tokens_within(0.072, 500_000, WAVE), 768, "any part takes too long: take all");
        assert_eq!(cost.tokens_within(-1.0, 0, WAVE), 0);
    }

    #[test]
    fn rows_of_a_prompt_count_as_whole_waves_and_a_decoded_row_as_itself() {
        assert_eq!(pairs(100, 1, WAVE), 101.0);
        assert_eq!(pairs(0, 2, WAVE), 792.0 * 1.5);
        assert_eq!(pairs(7, 5, NONE), (7..12).map(|p| f64::from(p + 1)).sum::<f64>());
    }
}

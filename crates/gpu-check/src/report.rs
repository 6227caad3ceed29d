//! The extent of a check, and its findings.

use anyhow::Result;

/// How much of each check is run.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Every n-th of the many cases of a check.
    pub every: u64,
    /// No large matrices, and only the first steps of long runs.
    pub small: bool,
}

impl Extent {
    pub const WHOLE: Self = Self { every: 1, small: false };
    /// Few cases, but some of every head size and storage. For tools that make a kernel a thousand
    /// times slower, such as compute-sanitizer.
    pub const SMALL: Self = Self { every: 13, small: true };

    pub(crate) fn takes(self, case: u64) -> bool {
        case.is_multiple_of(self.every)
    }

    /// A case of this size is run if everything is, or if the size is at most `small`.
    pub(crate) fn fits(self, size: usize, small: usize) -> bool {
        !self.small || size <= small
    }
}

/// The result of one kind of check.
#[derive(Clone, Debug)]
pub struct Finding {
    pub name: String,
    pub cases: usize,
    /// Largest difference as a share of the allowed one; above 1 is a failure.
    pub worst: f64,
    /// The first case that failed.
    pub failure: Option<String>,
}

/// Findings by name.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub findings: Vec<Finding>,
}

impl Report {
    fn finding(&mut self, name: &str) -> &mut Finding {
        let index = self.findings.iter().position(|f| f.name == name).unwrap_or_else(|| {
            self.findings.push(Finding { name: name.into(), cases: 0, worst: 0.0, failure: None });
            self.findings.len() - 1
        });
        &mut self.findings[index]
    }

    /// Runs a part of the check. If it cannot run to its end, that is a failure of its own, and the
    /// other parts go on.
    pub(crate) fn part(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = run(self) {
            let finding = self.finding(name);
            finding.worst = f64::INFINITY;
            finding.failure = Some(format!("it could not run to its end: {error:#}"));
        }
    }

    /// Counts one case of a check: `difference` may be at most `allowed`. NaN fails.
    pub(crate) fn case(&mut self, name: &str, difference: f64, allowed: f64, what: impl FnOnce() -> String) {
        let finding = self.finding(name);
        finding.cases += 1;
        let share = match difference {
            0.0 => 0.0,
            _ if allowed > 0.0 => difference / allowed,
            _ => f64::INFINITY,
        };
        if share.is_nan() || share > finding.worst {
            finding.worst = share;
        }
        if (difference > allowed || difference.is_nan()) && finding.failure.is_none() {
            let what = what();
            finding.failure = Some(format!("{what}: differs by {difference:.3e}, allowed {allowed:.3e}"));
        }
    }

    /// Adds the findings of another report, which was made after this one.
    pub(crate) fn absorb(&mut self, other: Self) {
        for found in other.findings {
            let finding = self.finding(&found.name);
            finding.cases += found.cases;
            if found.worst.is_nan() || found.worst > finding.worst {
                finding.worst = found.worst;
            }
            finding.failure = finding.failure.take().or(found.failure);
        }
    }

    /// The checks that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.failure.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_part_that_cannot_run_fails_and_keeps_what_others_found() {
        let mut report = Report::default();
        report.part("first", |report| {
            report.case("first", 0.5, 1.0, String::new);
            bail!("no kernel")
        });
        report.part("second", |report| {
            report.case("second", 0.5, 1.0, String::new);
            Ok(())
        });
        let failed: Vec<_> = report.failures().map(|f| f.name.as_str()).collect();
        assert_eq!((report.findings.len(), failed), (2, vec!["first"]));
        assert!(report.findings[0].failure.as_ref().unwrap().ends_with("no kernel"));
    }

    #[test]
    fn a_difference_above_the_allowed_one_and_nan_fail() {
        for (difference, allowed, fails) in [
            (0.0, 0.0, false),
            (1.0, 2.0, false),
            (1e-9, 0.0, true),
            (2.0, 1.0, true),
            (f64::NAN, 1.0, true),
            (f64::INFINITY, 1.0, true),
        ] {
            let mut report = Report::default();
            report.case("name", difference, allowed, || "case".into());
            assert_eq!(report.failures().count(), usize::from(fails), "{difference} of {allowed}");
            assert_eq!(report.findings[0].worst > 1.0 || report.findings[0].worst.is_nan(), fails);
        }
    }
}

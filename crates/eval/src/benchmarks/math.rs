//! MATH and AIME: a boxed answer, compared after its notation is normalized.
//!
//! Two answers are equal if their normalized notations are, or if both are numbers of the same
//! value. There is no algebra: `x+1` and `1+x` count as different, as in most graders of these
//! benchmarks.

use super::after_thoughts;

/// The text of the question.
pub(super) fn question(problem: &str) -> String {
    if problem.contains("\\boxed") {
        // The file brings its own instruction.
        return problem.to_owned();
    }
    format!("{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.", problem.trim())
}

/// Whether the answer ends in the right result.
pub fn is_right(answer: &str, right: &str) -> bool {
    let answer = after_thoughts(answer);
    let Some(found) = boxed(answer).or_else(|| stated(answer)) else { return false };
    let (found, right) = (plain(&found), plain(right));
    if found.is_empty() {
        return false;
    }
    found == right
        || match (value(&found), value(&right)) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-9 * b.abs().max(1.0),
            _ => false,
        }
}

/// The content of the last `\boxed{…}`.
pub fn boxed(text: &str) -> Option<String> {
    let at = text.rfind("\\boxed{").map(|at| at + "\\boxed{".len())?;
    let mut depth = 1usize;
    for (i, c) in text[at..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(text[at..at + i].to_owned());
        }
    }
    None
}

/// The text after the last "answer is" or "answer:", to the end of the line.
fn stated(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let end = |word: &str| lower.rfind(word).map(|at| at + word.len());
    let at = end("answer is").max(end("answer:"))?;
    let line = text[at..].lines().next()?.trim_start_matches([':', '*', ' ']);
    Some(line.trim_end_matches(['.', '*', ' ']).to_owned())
}

/// The notation without anything that does not change the value.
fn plain(text: &str) -> String {
    let mut out = text.trim().trim_end_matches('.').to_owned();
    for (from, to) in [
        ("\\left", ""),
        ("\\right", ""),
        ("\\!", ""),
        ("\\,", ""),
        ("\\;", ""),
        ("\\ ", ""),
        ("\\$", ""),
        ("$", ""),
        ("\\%", ""),
        ("%", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\\cdot", "*"),
        ("\\times", "*"),
        ("\u{2212}", "-"),
        ("{,}", ""),
    ] {
        out = out.replace(from, to);
    }
    for command in ["\\text{", "\\mathrm{", "\\textbf{", "\\mbox{"] {
        while let Some(at) = out.find(command) {
            let inner = at + command.len();
            let Some(close) = out[inner..].find('}') else { break };
            out = format!("{}{}{}", &out[..at], out[inner..inner + close].trim(), &out[inner + close + 1..]);
        }
    }
    // `x = 5` answers with 5.
    if let Some((name, rest)) = out.split_once('=')
        && name.trim().chars().all(char::is_alphabetic)
    {
        out = rest.to_owned();
    }
    out.retain(|c| !c.is_whitespace());
    short_fractions(&out)
}

/// `\frac12` as `\frac{1}{2}`.
fn short_fractions(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\\frac") {
        out.push_str(before);
        out.push_str("\\frac");
        let mut digits = after.chars();
        match (digits.next(), digits.next()) {
            (Some(a), Some(b)) if a.is_ascii_digit() && b.is_ascii_digit() => {
                out.push_str(&format!("{{{a}}}{{{b}}}"));
                rest = &after[2..];
            }
            _ => rest = after,
        }
    }
    out.push_str(rest);
    out
}

/// The value of a number or a fraction of numbers.
fn value(text: &str) -> Option<f64> {
    if let Some(rest) = text.strip_prefix('-') {
        return value(rest).map(|v| -v);
    }
    let number = |text: &str| {
        let grouped = text.split(',').skip(1).all(|group| group.len() == 3);
        let digits = if grouped { text.replace(',', "") } else { text.to_owned() };
        let plain = digits.chars().all(|c| c.is_ascii_digit() || c == '.') && !digits.is_empty();
        plain.then(|| digits.parse::<f64>().ok()).flatten()
    };
    if let Some((a, b)) =
        text.strip_prefix("\\frac{").and_then(|t| t.strip_suffix('}')).and_then(|t| t.split_once("}{"))
    {
        return Some(number(a)? / number(b).filter(|&b| b != 0.0)?);
    }
    if let Some((a, b)) = text.split_once('/') {
        return Some(number(a)? / number(b).filter(|&b| b != 0.0)?);
    }
    number(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_answer_in_other_notation() {
        for (answer, right) in [
            ("so \\boxed{\\dfrac{1}{2}}.", "\\frac{1}{2}"),
            ("\\boxed{\\frac12}", "\\frac{1}{2}"),
            ("\\boxed{0.5}", "\\frac{1}{2}"),
            ("\\boxed{1/2}", "\\frac12"),
            ("\\boxed{1,000}", "1000"),
            ("\\boxed{025}", "25"),
            ("\\boxed{x = 5}", "5"),
            ("\\boxed{ 90^\\circ }", "90"),
            ("\\boxed{\\text{(A)}}", "(A)"),
            ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})"),
            ("first \\boxed{1}, then \\boxed{2}", "2"),
            ("<think>\\boxed{7}</think> \\boxed{8}", "8"),
            ("The answer is 42.", "42"),
            ("**Answer:** -3", "-3"),
            ("\\boxed{10\\%}", "10"),
        ] {
            assert!(is_right(answer, right), "{answer} is {right}");
        }
    }

    #[test]
    fn other_answers_and_none() {
        for (answer, right) in [
            ("\\boxed{2}", "3"),
            ("no box", "3"),
            ("\\boxed{", "3"),
            ("\\boxed{}", "0"),
            ("\\boxed{1,23}", "123"),
            ("\\boxed{x+1}", "x+2"),
            ("the answer is", "5"),
        ] {
            assert!(!is_right(answer, right), "{answer} is not {right}");
        }
    }

    #[test]
    fn boxes_nest() {
        assert_eq!(boxed("\\boxed{\\frac{1}{2}}").as_deref(), Some("\\frac{1}{2}"));
        assert_eq!(boxed("\\boxed{1"), None);
    }
}

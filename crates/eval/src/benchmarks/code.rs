//! HumanEval: functions completed by the model and run against their tests.

use super::after_thoughts;

/// A problem of HumanEval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeProblem {
    /// Imports, helpers, the signature and its documentation.
    pub prompt: String,
    /// Defines `check(candidate)`.
    pub test: String,
    pub entry_point: String,
}

/// Ends of a completed function body: the next line at the left margin.
const ENDS: [&str; 6] = ["\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\n@"];

impl CodeProblem {
    /// The question to a chat model.
    pub fn question(&self) -> String {
        format!(
            "Complete the following Python function. Answer with the whole function in one Python code block.\n\n\
             ```python\n{}\n```",
            self.prompt.trim_end()
        )
    }

    /// A program that exits successfully if the answer is right.
    pub fn program(&self, answer: &str) -> String {
        let code = code_block(after_thoughts(answer));
        let definition = format!("def {}", self.entry_point);
        let solution = if code.contains(&definition) {
            // The answer may leave out the part of the prompt before the function (imports,
            // helpers).
            let preamble = self.prompt.split(&definition).next().unwrap_or("");
            format!("{preamble}\n{code}")
        } else {
            let end = ENDS.iter().filter_map(|stop| code.find(stop)).min().unwrap_or(code.len());
            format!("{}{}", self.prompt, &code[..end])
        };
        format!("{solution}\n\n{}\n\ncheck({})\n", self.test, self.entry_point)
    }
}

/// The first fenced block that has content, or the whole answer.
fn code_block(answer: &str) -> &str {
    let Some((_, rest)) = answer.split_once("```") else { return answer };
    // The rest of the opening line names the language.
    let body = rest.split_once('\n').map_or("", |(_, body)| body);
    body.split_once("\n```").map_or(body, |(code, _)| code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_become_programs() {
        let problem = CodeProblem {
            prompt: "import math\n\ndef f(x):\n    \"\"\"Twice x.\"\"\"\n".into(),
            test: "def check(c):\n    assert c(2) == 4\n".into(),
            entry_point: "f".into(),
        };
        let chat = "<think>def f(x): no</think>Here:\n```python\ndef f(x):\n    return 2 * x\n```\nDone.";
        assert_eq!(
            problem.program(chat),
            "import math\n\n\ndef f(x):\n    return 2 * x\n\ndef check(c):\n    assert c(2) == 4\n\n\ncheck(f)\n"
        );
        let completion = "    return 2 * x\n\ndef g():\n    pass\n";
        let program = problem.program(completion);
        assert!(
            program.contains("Twice x.\"\"\"\n    return 2 * x\n\n\ndef check") && !program.contains("def g")
        );
        assert!(problem.question().contains("```python\nimport math"));
    }
}

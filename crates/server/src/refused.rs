//! Request fields that change the answer in other servers and cannot be followed here.
//!
//! **Invariant:** such a field is refused by its name, unless its value asks for nothing else than
//! what happens anyway. Other fields that are not declared change no answer anywhere; they are
//! skipped and counted.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::schema::Field;

/// A refused field.
struct Refused {
    name: &'static str,
    /// Values that change nothing, as JSON. Null always is one.
    harmless: &'static [&'static str],
    instead: &'static str,
}

const fn refused(name: &'static str, harmless: &'static [&'static str], instead: &'static str) -> Refused {
    Refused { name, harmless, instead }
}

const NONE: &[&str] = &["[]", "{}", "\"\"", "false"];
const ZERO: &[&str] = &["0", "0.0"];
const ONE: &[&str] = &["1", "1.0"];

const REFUSED: &[Refused] = &[
    refused("functions", NONE, "use tools"),
    refused("function_call", &["\"auto\"", "\"none\""], "use tool_choice"),
    refused("allowed_token_ids", &[], "use logit_bias or guided_choice"),
    refused("bad_words", NONE, "use logit_bias"),
    refused("truncate_prompt_tokens", &[], "shorten the messages"),
    refused("thinking_token_budget", &[], "use max_tokens"),
    refused("thinking_budget", &[], "use max_tokens"),
    refused("length_penalty", ONE, "beam search is not supported"),
    refused("early_stopping", NONE, "beam search is not supported"),
    refused("dry_multiplier", ZERO, "use repetition_penalty"),
    refused("xtc_probability", ZERO, "use min_p"),
    refused("typical_p", ONE, "use top_p"),
    refused("tfs", ONE, "use top_p"),
    refused("top_a", ZERO, "use min_p"),
    refused("mirostat", ZERO, "use temperature"),
    refused("mirostat_mode", ZERO, "use temperature"),
    refused("dynatemp_range", ZERO, "use temperature"),
    refused("smoothing_factor", ZERO, "use temperature"),
    refused("no_repeat_ngram_size", ZERO, "use repetition_penalty"),
    refused("repeat_penalty", ONE, "use repetition_penalty"),
    refused("n_predict", &[], "use max_tokens"),
    refused("max_new_tokens", &[], "use max_tokens"),
    refused("min_new_tokens", ZERO, "use min_tokens"),
    refused("n_probs", ZERO, "use logprobs"),
    refused("stop_regex", NONE, "use stop"),
    refused("structural_tag", &[], "use tools with tool_choice"),
    refused("guided_whitespace_pattern", &[], "JSON is written with one space after `,` and `:`"),
    refused("logits_processors", NONE, "use logit_bias"),
    refused("custom_logit_processor", &[], "use logit_bias"),
    refused("return_hidden_states", &["false"], "hidden states stay in the engine"),
    refused("return_token_ids", &["false"], "use /tokenize"),
    refused("return_tokens_as_token_ids", &["false"], "use /tokenize"),
    refused("detokenize", &["true"], "answers are text"),
    refused("priority", ZERO, "requests are served in their order"),
    refused("lora", NONE, "adapters are not supported"),
    refused("lora_path", NONE, "adapters are not supported"),
    refused("lora_request", NONE, "adapters are not supported"),
    refused("prompt_embeds", &[], "send text or tokens"),
    refused("input_embeds", &[], "send text or tokens"),
    refused("modalities", &["[\"text\"]"], "answers are text"),
    refused("audio", &[], "answers are text"),
    refused("prediction", &[], "predicted outputs are not supported"),
    refused("web_search_options", &[], "the server has no tools of its own"),
    refused("verbosity", &["\"medium\""], "say it in the messages"),
    refused("vllm_xargs", NONE, "they are vLLM's own"),
    refused("kv", &["{}"], "use /v1/chat/completions, which has it"),
];

/// Fields that were skipped since the start.
static SKIPPED: AtomicU64 = AtomicU64::new(0);

pub fn is_refused(name: &str) -> bool {
    REFUSED.iter().any(|refused| refused.name == name)
}

/// Name and JSON Schema of every refused field: the values that change nothing, and the advice.
pub fn described() -> impl Iterator<Item = (&'static str, Value)> {
    REFUSED.iter().map(|refused| {
        let harmless = refused.harmless.iter().filter_map(|text| serde_json::from_str::<Value>(text).ok());
        let allowed: Vec<Value> = std::iter::once(Value::Null).chain(harmless).collect();
        let about = format!("Refused with any other value: {}", refused.instead);
        (refused.name, json!({"enum": allowed, "description": about, "x-refused": true}))
    })
}

/// Counts a field that nothing reads.
pub fn skip() {
    SKIPPED.fetch_add(1, Ordering::Relaxed);
}

pub fn skipped() -> u64 {
    SKIPPED.load(Ordering::Relaxed)
}

/// Takes the refused fields out of a body, except those that its tables declare.
///
/// # Errors
/// Names the first one that asks for something.
pub fn check(body: &mut Map<String, Value>, tables: &[&[Field]]) -> Result<(), ApiError> {
    let declared = |name: &str| tables.iter().copied().flatten().any(|field| field.name == name);
    for refused in REFUSED.iter().filter(|refused| !declared(refused.name)) {
        let Some(value) = body.remove(refused.name) else { continue };
        let text = value.to_string();
        if !value.is_null() && !refused.harmless.contains(&text.as_str()) {
            return Err(ApiError::param(refused.name, format!("is not supported; {}", refused.instead)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_that_ask_for_something_are_refused() {
        let check = |body: Value| check(&mut body.as_object().unwrap().clone(), &[]);
        assert!(check(json!({"priority": 0, "typical_p": 1.0, "bad_words": [], "functions": null})).is_ok());
        for refused in REFUSED {
            let error = check(json!({refused.name: {"asks": "for something"}})).unwrap_err();
            assert!(error.to_string().starts_with(refused.name), "{error}");
        }
    }
}

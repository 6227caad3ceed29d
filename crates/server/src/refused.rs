//! Request fields that change the answer in other servers, or on another route, and cannot be
//! followed here.
//!
//! **Invariant:** such a field is refused by its name, unless its value asks for nothing else than
//! what happens anyway. Other fields that are not declared change no answer anywhere; they are
//! skipped and counted.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::routes;
use crate::schema::Field;

/// Refused fields of one meaning.
struct Refused {
    names: &'static [&'static str],
    /// Values that change nothing, as JSON. Null always is one.
    harmless: &'static [&'static str],
    instead: &'static str,
}

const fn refused(
    names: &'static [&'static str],
    harmless: &'static [&'static str],
    instead: &'static str,
) -> Refused {
    Refused { names, harmless, instead }
}

const NONE: &[&str] = &["[]", "{}", "\"\"", "false"];
const TRUE: &[&str] = &["true"];
const ZERO: &[&str] = &["0", "0.0"];
const ONE: &[&str] = &["1", "1.0"];
const NO_LIMIT: &[&str] = &["-1"];

const BEAM: &str = "beam search is not supported";
const TEMPERATURE: &str = "use temperature";
const REPETITION: &str = "use repetition_penalty";
const TOKENS: &str = "use max_tokens";
const EFFORT: &str = "use reasoning_effort or enable_thinking";
const ADAPTERS: &str = "adapters are not supported";
const SHOWN: &str = "the answer has no place for it";
const TRUNCATE: &str = "shorten the messages";
const TOKENIZE: &str = "use /tokenize";

/// Refused where an answer of the model is asked for, on the routes that do not declare the name.
const REFUSED: &[Refused] = &[
    refused(&["functions"], NONE, "use tools"),
    refused(&["function_call"], &["\"auto\"", "\"none\""], "use tool_choice"),
    refused(&["allowed_token_ids"], &[], "use logit_bias or guided_choice"),
    refused(&["bad_words", "banned_tokens", "banned_strings"], NONE, "use logit_bias"),
    refused(&["truncate_prompt_tokens"], NO_LIMIT, TRUNCATE),
    refused(&["truncation_side"], &[], TRUNCATE),
    refused(&["truncate"], NONE, TRUNCATE),
    refused(&["truncation"], &["\"disabled\""], TRUNCATE),
    refused(&["truncation_length", "transforms"], NONE, TRUNCATE),
    refused(&["n_keep", "n_discard"], ZERO, TRUNCATE),
    refused(&["thinking_token_budget", "thinking_budget", "thinking_budget_tokens"], NO_LIMIT, TOKENS),
    refused(&["reasoning_budget", "reasoning_budget_tokens"], NO_LIMIT, TOKENS),
    refused(&["reasoning_budget_message"], NONE, "say it in the messages"),
    refused(&["reasoning_format"], &["\"auto\"", "\"deepseek\""], "use separate_reasoning"),
    refused(&["include_reasoning"], TRUE, "use enable_thinking, or leave reasoning_content out"),
    refused(&["stream_reasoning"], TRUE, "reasoning is streamed as it comes"),
    refused(&["thinking_forced_open", "reasoning", "thinking"], NONE, EFFORT),
    refused(&["think"], &[], EFFORT),
    refused(&["length_penalty"], ONE, BEAM),
    refused(&["early_stopping"], NONE, BEAM),
    refused(&["beam_width", "num_beams"], ONE, BEAM),
    refused(&["diversity_penalty"], ZERO, BEAM),
    refused(&["dry_multiplier"], ZERO, REPETITION),
    refused(&["xtc_probability"], ZERO, "use min_p"),
    refused(&["typical_p", "typical", "tfs", "tfs_z"], ONE, "use top_p"),
    refused(&["top_a", "epsilon_cutoff", "eta_cutoff"], ZERO, "use min_p"),
    refused(&["top_n_sigma", "nsigma"], &["0", "0.0", "-1", "-1.0"], "use min_p"),
    refused(&["adaptive_target"], &["0", "0.0", "-1", "-1.0"], TEMPERATURE),
    refused(&["samplers"], NONE, "use temperature, top_k, top_p and min_p, which apply in that order"),
    refused(
        &["sampler_priority"],
        NONE,
        "use temperature, top_k, top_p and min_p, which apply in that order",
    ),
    refused(&["min_keep"], &["0", "1"], "use temperature"),
    refused(&["mirostat", "mirostat_mode", "dynatemp_range"], ZERO, TEMPERATURE),
    refused(&["dynamic_temperature"], NONE, TEMPERATURE),
    refused(&["smoothing_factor"], ZERO, TEMPERATURE),
    refused(&["do_sample"], TRUE, "use temperature 0"),
    refused(&["penalty_alpha", "no_repeat_ngram_size"], ZERO, REPETITION),
    refused(&["repeat_penalty"], ONE, REPETITION),
    refused(&["repetition_detection"], NONE, REPETITION),
    refused(&["encoder_repetition_penalty"], ONE, REPETITION),
    refused(&["guidance_scale"], ONE, "say it in the messages"),
    refused(&["negative_prompt"], NONE, "say it in the messages"),
    refused(&["n_predict", "num_predict"], NO_LIMIT, TOKENS),
    refused(&["max_new_tokens", "max_length", "max_output_tokens"], &[], TOKENS),
    refused(&["min_new_tokens"], ZERO, "use min_tokens"),
    refused(&["t_max_predict_ms"], ZERO, TOKENS),
    refused(&["max_time"], &[], TOKENS),
    refused(&["n_indent"], ZERO, "say it in the messages"),
    refused(&["n_cmpl"], ONE, "use n"),
    refused(&["n_probs"], ZERO, "use logprobs"),
    refused(&["logprob_token_ids"], NONE, "use top_logprobs"),
    refused(&["logprob_start_len"], NO_LIMIT, "use prompt_logprobs"),
    refused(&["top_logprobs_num"], ZERO, "use top_logprobs"),
    refused(&["token_ids_logprob"], NONE, "use top_logprobs"),
    refused(&["post_sampling_probs"], NONE, "use logprobs"),
    refused(&["stop_regex", "stop_strings", "stop_sequences"], NONE, "use stop"),
    refused(&["custom_token_bans"], NONE, "use logit_bias"),
    refused(&["token_healing"], NONE, "end the prompt at the end of a word"),
    refused(&["structural_tag"], &[], "use tools with tool_choice"),
    refused(&["guided_whitespace_pattern"], &[], "JSON is written with one space after `,` and `:`"),
    refused(&["grammar_lazy", "grammar_triggers"], NONE, "use tools with strict: true"),
    refused(&["format"], NONE, "use response_format"),
    refused(&["options"], NONE, "send its members as fields of the request"),
    refused(&["logits_processors", "custom_logit_processor"], NONE, "use logit_bias"),
    refused(&["custom_params"], NONE, "they are SGLang's own"),
    refused(&["session_params"], NONE, "send the whole conversation"),
    refused(&["return_hidden_states"], &["false"], "hidden states stay in the engine"),
    refused(&["return_routed_experts"], &["false"], SHOWN),
    refused(&["return_token_ids", "return_tokens", "return_tokens_as_token_ids"], &["false"], TOKENIZE),
    refused(&["return_prompt_text"], &["false"], "use /v1/chat/completions/render"),
    refused(&["return_prompt_token_ids"], &["false"], "use /v1/chat/completions/render"),
    refused(&["return_meta_info"], &["false"], SHOWN),
    refused(&["return_full_text"], &["false"], "use echo on /v1/completions"),
    refused(&["return_dict_in_generate", "return_bytes", "enable_response_messages"], &["false"], SHOWN),
    refused(&["response_fields"], NONE, SHOWN),
    refused(&["decoder_input_details"], &["false"], "use prompt_logprobs"),
    refused(&["details"], &["false"], "use logprobs"),
    refused(&["top_n_tokens"], ZERO, "use top_logprobs"),
    refused(&["detokenize"], TRUE, "answers are text"),
    refused(&["spaces_between_special_tokens"], TRUE, "use skip_special_tokens"),
    refused(&["watermark", "watermarking"], NONE, "answers are not marked"),
    refused(&["priority"], ZERO, "requests are served in their order"),
    refused(&["lora", "lora_path", "lora_request", "adapter_id", "adapters"], NONE, ADAPTERS),
    refused(&["prompt_embeds", "input_embeds"], &[], "send text or tokens"),
    refused(&["input_ids"], &[], "use prompt on /v1/completions"),
    refused(&["input_prefix", "input_suffix", "input_extra"], NONE, "put everything into the prompt"),
    refused(&["image_data", "images"], NONE, "images are not supported"),
    refused(&["video_data"], NONE, "videos are not supported"),
    refused(&["audio_data"], NONE, "sound is not supported"),
    refused(&["modalities"], &["[\"text\"]"], "answers are text"),
    refused(&["audio"], &[], "answers are text"),
    refused(&["prediction"], &[], "predicted outputs are not supported"),
    refused(&["web_search_options"], &[], "the server has no tools of its own"),
    refused(&["plugins"], NONE, "the server has no tools of its own"),
    refused(&["tool_prompt"], NONE, "the chat template says how tools are shown"),
    refused(&["previous_input_messages"], NONE, "send the whole conversation as input"),
    refused(&["previous_response"], &[], "send the whole conversation as input"),
    refused(&["template"], NONE, "use chat_template"),
    refused(&["raw"], NONE, "use /v1/completions"),
    refused(&["context"], NONE, "send the whole conversation"),
    refused(&["task"], NONE, "say it in the messages"),
    refused(&["verbosity"], &["\"medium\""], "say it in the messages"),
    refused(&["vllm_xargs"], NONE, "they are vLLM's own"),
    refused(&["parse_tool_calls"], TRUE, "leave tools out to get calls as text"),
    refused(&["preserved_tokens"], NONE, "use skip_special_tokens"),
    refused(&["chat_format"], &["0"], "the chat template says how calls are written"),
    refused(&["reasoning_in_content"], NONE, "use separate_reasoning"),
    refused(&["repeat_last_n", "penalty_range"], NO_LIMIT, "penalties count all tokens"),
    refused(&["allowed_tokens"], NONE, "use logit_bias or guided_choice"),
    refused(&["ban_eos_token"], NONE, "use ignore_eos"),
    refused(&["add_bos_token"], TRUE, "use add_special_tokens"),
    refused(&["cfg_scale"], ONE, "say it in the messages"),
    refused(&["min_temp", "max_temp"], ONE, TEMPERATURE),
    refused(
        &["temperature_last"],
        NONE,
        "use temperature, top_k, top_p and min_p, which apply in that order",
    ),
    refused(&["skew"], ZERO, TEMPERATURE),
    refused(&["prompt_template", "instruction_template"], NONE, "use chat_template"),
    refused(&["template_vars"], NONE, "use chat_template_kwargs"),
    refused(&["response_prefix"], NONE, "use continue_final_message"),
    refused(&["regex_pattern"], NONE, "use regex"),
    refused(&["grammar_string"], NONE, "use grammar"),
    refused(&["auto_max_new_tokens"], NONE, TOKENS),
    refused(&["character"], NONE, "say it in the messages"),
    refused(&["preset"], NONE, "send its members as fields of the request"),
    refused(&["mode"], &["\"instruct\""], "the chat template shows the messages"),
    refused(&["generation_config"], NONE, "send its members as fields of the request"),
    refused(&["truncate_sequence"], NONE, TRUNCATE),
    // Fields of some of our routes, with the values that change nothing on the others.
    refused(&["max_tokens"], &[], "use max_output_tokens"),
    refused(&["max_completion_tokens"], &[], "use max_tokens, or max_output_tokens on /v1/responses"),
    refused(
        &["stream_options"],
        &[
            "{}",
            "{\"include_usage\":true}",
            "{\"include_usage\":false}",
            "{\"include_obfuscation\":true}",
            "{\"include_obfuscation\":false}",
        ],
        "the usage always comes with the last event",
    ),
    refused(&["kv"], &["{}"], "use /v1/chat/completions, which has it"),
    refused(&["n"], ONE, "use /v1/chat/completions, which has it"),
    refused(&["best_of"], ONE, "ask for n choices and pick among them"),
    refused(&["suffix"], NONE, "put everything into the messages"),
    refused(&["echo"], NONE, "use /v1/completions, which has it"),
    refused(&["logprobs"], &["0", "false"], "use /v1/chat/completions, which has it"),
    refused(&["top_logprobs"], ZERO, "use /v1/chat/completions, which has it"),
    refused(&["parallel_tool_calls"], &["true", "false"], "use /v1/chat/completions, which has it"),
    refused(&["tool_choice"], &["\"auto\"", "\"none\""], "use /v1/chat/completions, which has it"),
    refused(&["separate_reasoning", "add_generation_prompt"], TRUE, "use /v1/chat/completions, which has it"),
    refused(&["text"], &["{\"format\":{\"type\":\"text\"}}"], "use response_format"),
    refused(&["system", "instructions"], NONE, "send a message of the system"),
    refused(&["output_config", "output_format"], NONE, "use response_format"),
    refused(&["include"], NONE, "use /v1/responses, which has it"),
];

/// The same for `/v1/embeddings`.
const OF_EMBEDDINGS: &[Refused] = &[
    refused(&["truncate_prompt_tokens"], NO_LIMIT, "shorten the input"),
    refused(&["truncation_side", "truncation_direction"], &[], "shorten the input"),
    refused(&["truncate"], NONE, "shorten the input"),
    refused(&["max_length"], &[], "shorten the input"),
    refused(&["normalize", "use_activation"], TRUE, "vectors have length 1: scale them in the client"),
    refused(&["embd_normalize"], &["2"], "vectors have length 1: scale them in the client"),
    refused(&["pooling", "pooling_type"], &["\"last\""], "the vector is the last token's hidden state"),
    refused(&["embed_dtype"], &["\"float32\""], "numbers are f32"),
    refused(&["endianness"], &["\"native\"", "\"little\""], "base64 is little-endian"),
    refused(&["output_dtype"], &["\"float\""], "numbers are f32"),
    refused(&["output_dimension"], &[], "use dimensions"),
    refused(&["embedding_types"], &["[\"float\"]"], "use encoding_format"),
    refused(&["input_type", "prompt_name", "instruction"], NONE, "write the instruction into the input"),
    refused(&["messages", "content", "chat_template", "chat_template_kwargs"], NONE, "use input"),
    refused(&["continue_final_message"], NONE, "use input"),
    refused(&["late_chunking"], NONE, "send each chunk as an input"),
    refused(&["task"], &["\"embed\""], "the route has one task"),
    refused(&["image"], &[], "images are not supported"),
    refused(&["images"], NONE, "images are not supported"),
    refused(&["input_ids"], &[], "use input"),
    refused(&["priority"], ZERO, "requests are served in their order"),
    refused(&["lora_path"], NONE, ADAPTERS),
];

/// Values that ask for nothing, of fields that another route declares.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Fields that were skipped since the start.
static SKIPPED: AtomicU64 = AtomicU64::new(0);

/// What a route refuses: depends on what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Answer,
    Vectors,
    Other,
}

fn purpose(tables: &[&[Field]]) -> Purpose {
    let declares = |name: &str| declared(tables, name).is_some();
    match () {
        () if declares("temperature") => Purpose::Answer,
        () if declares("dimensions") => Purpose::Vectors,
        () => Purpose::Other,
    }
}

/// Whether a body with these fields asks for an answer of the model.
pub fn generates(tables: &[&[Field]]) -> bool {
    purpose(tables) == Purpose::Answer
}

fn declared<'a>(tables: &[&'a [Field]], name: &str) -> Option<&'a Field> {
    tables.iter().copied().flatten().find(|field| field.name == name)
}

fn table(tables: &[&[Field]]) -> &'static [Refused] {
    match purpose(tables) {
        Purpose::Answer => REFUSED,
        Purpose::Vectors => OF_EMBEDDINGS,
        Purpose::Other => &[],
    }
}

/// The route that declares a field which these tables do not have.
fn elsewhere(tables: &[&[Field]], name: &str) -> Option<&'static str> {
    let mut others = routes::generating().filter(|_| generates(tables));
    others
        .find(|(_, theirs)| declared(theirs, name).is_some_and(|field| !field.is_ignored()))
        .map(|(path, _)| path)
}

/// Whether a field that `tables` do not declare must be looked at.
pub fn is_refused(tables: &[&[Field]], name: &str) -> bool {
    table(tables).iter().any(|refused| refused.names.contains(&name)) || elsewhere(tables, name).is_some()
}

/// Name and JSON Schema of every refused field: the values that change nothing, and the advice.
pub fn described(tables: &[&[Field]]) -> Map<String, Value> {
    let schema = |allowed: Vec<Value>, instead: &str| {
        let about = format!("Refused with any other value: {instead}");
        json!({"enum": allowed, "description": about, "x-refused": true})
    };
    let mut all = Map::new();
    for refused in table(tables) {
        let harmless = refused.harmless.iter().filter_map(|text| serde_json::from_str::<Value>(text).ok());
        let allowed = std::iter::once(Value::Null).chain(harmless).collect();
        let schema = schema(allowed, refused.instead);
        all.extend(refused.names.iter().map(|name| ((*name).to_owned(), schema.clone())));
    }
    let others = routes::generating().filter(|_| generates(tables));
    for (path, field) in
        others.flat_map(|(path, theirs)| theirs.iter().copied().flatten().map(move |f| (path, f)))
    {
        if !field.is_ignored() && !all.contains_key(field.name) {
            let nothing = vec![json!(null), json!(false), json!(""), json!([]), json!({})];
            all.insert(field.name.to_owned(), schema(nothing, &format!("use {path}, which has it")));
        }
    }
    all.retain(|name, _| declared(tables, name).is_none());
    all
}

/// Counts a field that nothing reads.
pub fn skip() {
    SKIPPED.fetch_add(1, Ordering::Relaxed);
}

pub fn skipped() -> u64 {
    SKIPPED.load(Ordering::Relaxed)
}

/// Takes the fields that its tables do not declare out of a body.
///
/// # Errors
/// Names the first one that asks for something.
pub fn check(body: &mut Map<String, Value>, tables: &[&[Field]]) -> Result<(), ApiError> {
    let strange: Vec<String> = body.keys().filter(|name| declared(tables, name).is_none()).cloned().collect();
    for name in strange {
        let Some(value) = body.remove(&name).filter(|value| !value.is_null()) else { continue };
        let refuse =
            |instead: &str| Err(ApiError::param(name.as_str(), format!("is not supported here; {instead}")));
        if let Some(refused) = table(tables).iter().find(|refused| refused.names.contains(&name.as_str())) {
            let text = value.to_string();
            if !refused.harmless.contains(&text.as_str()) {
                return refuse(refused.instead);
            }
        } else if let Some(path) = elsewhere(tables, &name).filter(|_| !is_nothing(&value)) {
            return refuse(&format!("use {path}, which has it"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Kind;

    #[test]
    fn only_values_that_ask_for_something_are_refused() {
        for (own, table) in [("temperature", REFUSED), ("dimensions", OF_EMBEDDINGS)] {
            let field = [Field { name: own, kind: Kind::Any, about: "", required: false }];
            let check = |body: Value| check(&mut body.as_object().unwrap().clone(), &[&field]);
            let all = table.iter().flat_map(|refused| refused.names.iter().map(move |name| (*name, refused)));
            for (name, refused) in all.clone() {
                let error = check(json!({name: {"asks": "for something"}})).unwrap_err();
                assert!(error.to_string().starts_with(name), "{error}");
                for text in refused.harmless.iter().chain(&["null"]) {
                    let value: Value = serde_json::from_str(text).unwrap();
                    assert_eq!(value.to_string(), *text, "compared as text");
                    check(json!({name: value})).unwrap();
                }
            }
            let mut names: Vec<&str> = all.map(|(name, _)| name).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "every name stands once");
        }
    }
}

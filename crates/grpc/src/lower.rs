//! From a request to the fields of a completion, and from a refusal to a status.
//!
//! Absent means the model's default, as in HTTP. In messages of `vllm-proto` before 0.4 a zero is
//! absent; in later ones a zero that is present switches top-k or min-p off. Fields that only hint
//! (`priority`, `session_id`, `kv_hints`) are not read.

use crate::transfer;
use oscar_engine::EngineInfo;
use oscar_server::ApiError;
use serde_json::{Map, Value, json};
use tonic::{Code, Status};
use vllm_proto as pb;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::generate_request::Prompt;

/// The fields of a completion and the fields of a gRPC request that they come from.
const NAMES: [(&str, &str); 21] = [
    ("prompt", "token_ids"),
    ("temperature", "temperature"),
    ("n", "sampling.num_sequences"),
    ("top_k", "sampling.top_k"),
    ("top_p", "sampling.top_p"),
    ("min_p", "sampling.min_p"),
    ("seed", "sampling.seed"),
    ("presence_penalty", "decoding.presence_penalty"),
    ("frequency_penalty", "decoding.frequency_penalty"),
    ("repetition_penalty", "decoding.repetition_penalty"),
    ("logit_bias", "decoding.logit_bias"),
    ("structured_outputs.json", "decoding.json"),
    ("structured_outputs.regex", "decoding.regex"),
    ("structured_outputs.choice", "decoding.choice"),
    ("structured_outputs.grammar", "decoding.grammar"),
    ("max_tokens", "stopping.max_new_tokens"),
    ("min_tokens", "stopping.min_new_tokens"),
    ("stop_token_ids", "stopping.stop_token_ids"),
    ("stop", "stopping.stop_strings"),
    ("logprobs", "response.output_candidates"),
    ("prompt_logprobs", "response.prompt_candidates"),
];

/// The value reported for a log-probability that is not finite, as in HTTP.
const FLOOR: f32 = -9999.0;

pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { FLOOR }
}

fn wrong(name: &str, problem: &str) -> Status {
    Status::invalid_argument(format!("{name}: {problem}"))
}

/// The fields of `POST /v1/completions` that ask for the same.
pub fn fields(request: pb::GenerateRequest, engine: &EngineInfo) -> Result<Map<String, Value>, Status> {
    refuse(&request)?;
    check_sizes(&request, engine)?;
    check_numbers(&request)?;
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
    if !request.model.is_empty() {
        set("model", json!(request.model));
    }
    let room = match &request.prompt {
        Some(Prompt::TokenIds(tokens)) if !tokens.ids.is_empty() => {
            set("prompt", json!(tokens.ids));
            engine.context.saturating_sub(tokens.ids.len())
        }
        Some(Prompt::Text(text)) if !text.is_empty() => {
            set("prompt", json!(text));
            // The tokens are not counted yet. Every one has at least a byte.
            engine.context.saturating_sub(text.len())
        }
        _ => return Err(wrong("token_ids", "is empty: at least one token is needed")),
    };
    if let Some(temperature) = request.temperature {
        set("temperature", json!(temperature));
    }
    if let Some(sampling) = request.sampling {
        set("n", json!(sampling.num_sequences.max(1)));
        for (name, value) in [("top_p", sampling.top_p), ("min_p", sampling.min_p)] {
            set(name, json!(value));
        }
        set("top_k", json!(sampling.top_k));
        set("seed", json!(sampling.seed));
    }
    if let Some(decoding) = request.decoding {
        set("presence_penalty", json!(decoding.presence_penalty));
        set("frequency_penalty", json!(decoding.frequency_penalty));
        if decoding.repetition_penalty != 0.0 {
            set("repetition_penalty", json!(decoding.repetition_penalty));
        }
        let bias = decoding.logit_bias.iter().map(|(token, bias)| (token.to_string(), json!(bias)));
        set("logit_bias", Value::Object(bias.collect()));
        if let Some(form) = decoding.structured_output {
            set("structured_outputs", structured(form)?);
        }
    }
    let stopping = request.stopping.unwrap_or_default();
    let most = match stopping.max_new_tokens {
        0 => room.max(1),
        most => most as usize,
    };
    set("max_tokens", json!(most));
    set("min_tokens", json!(stopping.min_new_tokens));
    set("stop_token_ids", json!(stopping.stop_token_ids));
    set("stop", json!(stopping.stop_strings));
    set("include_stop_str_in_output", json!(stopping.include_stop_strings));
    set("ignore_eos", json!(stopping.ignore_eos));
    let response = request.response.unwrap_or_default();
    if response.output_logprobs {
        // One alternative at least tells whether the chosen token was the most likely one.
        set(
            "logprobs",
            json!(alternatives("response.output_candidates", response.output_candidates)?.max(1)),
        );
    }
    if response.prompt_logprobs {
        set(
            "prompt_logprobs",
            json!(alternatives("response.prompt_candidates", response.prompt_candidates)?),
        );
    }
    set("skip_special_tokens", json!(response.skip_special_tokens));
    let kv = request.kv.unwrap_or_default();
    if !kv.cache_salt.is_empty() {
        set("cache_salt", json!(kv.cache_salt));
    }
    if let Some(params) = kv.kv_transfer_params {
        set("kv_transfer_params", transfer::to_json(params)?);
    }
    Ok(fields)
}

/// Refuses fields that change an answer and are not followed.
fn refuse(request: &pb::GenerateRequest) -> Result<(), Status> {
    let (decoding, kv) = (request.decoding.as_ref(), request.kv.as_ref());
    let budget = request.stopping.as_ref().and_then(|stopping| stopping.thinking_token_budget);
    let refused = [
        ("truncate_prompt_tokens", request.truncate_prompt_tokens != 0),
        ("media", !request.media.is_empty()),
        ("lora_name", !request.lora_name.is_empty()),
        ("decoding.allowed_token_ids", decoding.is_some_and(|d| !d.allowed_token_ids.is_empty())),
        ("decoding.bad_words_token_ids", decoding.is_some_and(|d| !d.bad_words_token_ids.is_empty())),
        ("stopping.thinking_token_budget", budget.is_some_and(|budget| budget >= 0)),
        ("kv.bypass_prefix_cache", kv.is_some_and(|kv| kv.bypass_prefix_cache)),
        ("kv.ec_transfer_params", kv.is_some_and(|kv| kv.ec_transfer_params.is_some())),
    ];
    match refused.iter().find(|(_, there)| *there) {
        Some((name, _)) => Err(wrong(name, "is not supported")),
        None => Ok(()),
    }
}

/// Refuses lists that no valid request has. JSON takes many times the bytes of a message, so this comes
/// before it.
fn check_sizes(request: &pb::GenerateRequest, engine: &EngineInfo) -> Result<(), Status> {
    const MOST_STOPS: usize = 1024;
    const MOST_CHOICES: usize = 1 << 14;
    let prompt = match &request.prompt {
        Some(Prompt::TokenIds(tokens)) => tokens.ids.len(),
        Some(Prompt::Text(_)) | None => 0,
    };
    let stopping = request.stopping.as_ref();
    let decoding = request.decoding.as_ref();
    let choices = match decoding.and_then(|decoding| decoding.structured_output.as_ref()) {
        Some(StructuredOutput::Choice(choice)) => choice.choices.len(),
        _ => 0,
    };
    let sizes = [
        ("token_ids", prompt, engine.context),
        ("stopping.stop_token_ids", stopping.map_or(0, |s| s.stop_token_ids.len()), MOST_STOPS),
        ("stopping.stop_strings", stopping.map_or(0, |s| s.stop_strings.len()), MOST_STOPS),
        ("decoding.logit_bias", decoding.map_or(0, |d| d.logit_bias.len()), engine.vocab_size),
        ("decoding.choice", choices, MOST_CHOICES),
    ];
    match sizes.iter().find(|(_, count, most)| count > most) {
        Some((name, count, most)) => Err(wrong(name, &format!("{count} are more than the {most} allowed"))),
        None => Ok(()),
    }
}

/// Refuses numbers that JSON does not have: there they would count as absent.
fn check_numbers(request: &pb::GenerateRequest) -> Result<(), Status> {
    let (sampling, decoding) = (request.sampling.unwrap_or_default(), request.decoding.as_ref());
    let of = |penalty: fn(&pb::DecodingParameters) -> f32| decoding.map(penalty);
    let numbers = [
        ("temperature", request.temperature),
        ("sampling.top_p", sampling.top_p),
        ("sampling.min_p", sampling.min_p),
        ("decoding.presence_penalty", of(|d| d.presence_penalty)),
        ("decoding.frequency_penalty", of(|d| d.frequency_penalty)),
        ("decoding.repetition_penalty", of(|d| d.repetition_penalty)),
        (
            "decoding.logit_bias",
            decoding.and_then(|d| d.logit_bias.values().copied().find(|b| !b.is_finite())),
        ),
    ];
    match numbers.iter().find(|(_, number)| number.is_some_and(|number| !number.is_finite())) {
        Some((name, _)) => Err(wrong(name, "must be a finite number")),
        None => Ok(()),
    }
}

fn structured(form: StructuredOutput) -> Result<Value, Status> {
    Ok(match form {
        StructuredOutput::Json(schema) => {
            let schema: Value =
                serde_json::from_str(&schema).map_err(|error| wrong("decoding.json", &error.to_string()))?;
            json!({"json": schema})
        }
        StructuredOutput::Regex(regex) => json!({"regex": regex}),
        StructuredOutput::Choice(choice) => json!({"choice": choice.choices}),
        StructuredOutput::Grammar(grammar) => json!({"grammar": grammar}),
        StructuredOutput::JsonObject(wanted) => json!({"json_object": wanted}),
        StructuredOutput::StructuralTag(_) => {
            return Err(wrong("decoding.structural_tag", "is not supported"));
        }
    })
}

fn alternatives(name: &str, wanted: Option<pb::CandidateTokens>) -> Result<u32, Status> {
    match wanted.and_then(|wanted| wanted.select) {
        None => Ok(0),
        Some(Select::TopN(count)) => Ok(count),
        Some(Select::TokenIds(_) | Select::All(_)) => Err(wrong(name, "only top_n is supported")),
    }
}

/// The status of a refusal. It names the field of the gRPC request.
pub fn status(error: &ApiError) -> Status {
    let code = match error.status().as_u16() {
        400 | 413 => Code::InvalidArgument,
        404 => Code::NotFound,
        429 => Code::ResourceExhausted,
        503 => Code::Unavailable,
        _ => Code::Internal,
    };
    let (body, message) = (error.to_json(), error.to_string());
    let param = body["error"]["param"].as_str().unwrap_or_default();
    let known = NAMES.iter().find(|(ours, _)| *ours == param);
    let is_transfer = param.starts_with("kv_transfer_params");
    let message = match (known, message.strip_prefix(param)) {
        (_, Some(problem)) if is_transfer => format!("kv.{param}{problem}"),
        (Some((_, theirs)), Some(problem)) => format!("{theirs}{problem}"),
        (Some((_, theirs)), None) => format!("{theirs}: {message}"),
        (None, _) => message,
    };
    Status::new(code, message)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use prost::Message;

    /// A request as Google's Python library writes it.
    pub const REQUEST: &str = "0a02723112016d22060a040102ac022d0000003f32060801100028093a091d0000a03f3a02612b420a08051a010722017830014a0a2001280130013a0208025203120173";

    pub fn decoded(hex: &str) -> pb::GenerateRequest {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        pb::GenerateRequest::decode(&bytes[..]).unwrap()
    }

    fn engine() -> EngineInfo {
        EngineInfo {
            model: "m".into(),
            kv_format: "oscar".into(),
            kv_bits: 2.25,
            device: "cpu".into(),
            attention: "none".into(),
            context: 100,
            vocab_size: 1000,
            layers: 1,
            ranks: 1,
            hidden_size: 1,
            kv_budget_bytes: 1,
            full_block_bytes: 1,
            coded_block_bytes: 1,
            sliding_block_bytes: 0,
            sliding_window: None,
            state_bytes: 0,
            page_tokens: 64,
            sink: 64,
            recent: 256,
            approximate_hits: false,
            row_cap: None,
            keeps_base: false,
        }
    }

    #[test]
    fn a_request_becomes_a_completion() {
        let expected = json!({"model": "m", "prompt": [1, 2, 300], "temperature": 0.5, "n": 1, "top_p": null,
            "min_p": null, "top_k": 0, "seed": 9, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.25, "logit_bias": {}, "structured_outputs": {"regex": "a+"}, "max_tokens": 5,
            "min_tokens": 0, "stop_token_ids": [7], "stop": ["x"], "include_stop_str_in_output": false,
            "ignore_eos": true, "logprobs": 2, "skip_special_tokens": null, "cache_salt": "s"});
        assert_eq!(Value::Object(fields(decoded(REQUEST), &engine()).unwrap()), expected);
    }

    #[test]
    fn what_is_left_open_has_defaults() {
        let prompt = Some(Prompt::TokenIds(pb::TokenIds { ids: vec![1; 30] }));
        let fields = fields(pb::GenerateRequest { prompt, ..Default::default() }, &engine()).unwrap();
        assert_eq!(fields["max_tokens"], 70, "the rest of the context");
        for name in
            ["temperature", "n", "logprobs", "prompt_logprobs", "cache_salt", "model", "repetition_penalty"]
        {
            assert!(!fields.contains_key(name), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_refused_by_name() {
        type Change = fn(&mut pb::GenerateRequest);
        let cases: [(&str, Change); 13] = [
            ("token_ids", |r| r.prompt = Some(Prompt::TokenIds(pb::TokenIds { ids: vec![1; 101] }))),
            ("temperature", |r| r.temperature = Some(f32::NAN)),
            ("sampling.min_p", |r| r.sampling.as_mut().unwrap().min_p = Some(f32::INFINITY)),
            ("decoding.logit_bias", |r| r.decoding.as_mut().unwrap().logit_bias = [(1, f32::NAN)].into()),
            ("stopping.stop_strings", |r| {
                r.stopping.as_mut().unwrap().stop_strings = vec![String::new(); 1025]
            }),
            ("token_ids", |r| r.prompt = None),
            ("token_ids", |r| r.prompt = Some(Prompt::TokenIds(pb::TokenIds::default()))),
            ("truncate_prompt_tokens", |r| r.truncate_prompt_tokens = 5),
            ("lora_name", |r| r.lora_name = "x".into()),
            ("media", |r| r.media = vec![pb::MediaItem::default()]),
            ("decoding.allowed_token_ids", |r| r.decoding.as_mut().unwrap().allowed_token_ids = vec![1]),
            ("kv.bypass_prefix_cache", |r| r.kv.as_mut().unwrap().bypass_prefix_cache = true),
            ("decoding.json", |r| {
                r.decoding.as_mut().unwrap().structured_output = Some(StructuredOutput::Json("{".into()));
            }),
        ];
        for (name, change) in cases {
            let mut request = decoded(REQUEST);
            change(&mut request);
            let status = fields(request, &engine()).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().starts_with(&format!("{name}: ")), "{status}");
        }
    }
}

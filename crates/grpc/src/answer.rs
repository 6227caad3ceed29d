//! From outputs of a generation to messages.
//!
//! Dynamo's sidecar checks that the tokens of all messages add up to the count of the last one, and
//! drops text that comes with neither a token nor the end. So text without a token waits for the
//! message that ends its choice, and a stop token, which is not delivered, is not counted.

use crate::{lower, transfer};
use oscar_engine::{RequestError, TokenLogprobs};
use oscar_server::{Finish, Output};
use oscar_text::ReplyEvent;
use std::collections::BTreeMap;
use tonic::Status;
use vllm_proto as pb;
use vllm_proto::candidate_token_info::TokenInfo;
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::generate_request::Prompt;

/// What the client wants of an answer, and how far it has come.
pub struct Answer {
    token_ids: bool,
    text: bool,
    logprobs: bool,
    candidates: bool,
    prompt_logprobs: bool,
    /// The prompt, if it came as tokens and they are wanted.
    prompt: Vec<u32>,
    /// Stop tokens of the client. Others are the model's.
    stop_token_ids: Vec<u32>,
    cached_tokens: usize,
    /// Where another machine fetches the prompt's pages.
    kept: Option<prost_types::Struct>,
    choices: BTreeMap<usize, ChoiceState>,
}

#[derive(Default)]
struct ChoiceState {
    tokens: u32,
    /// Text that came without a token.
    held: String,
}

impl Answer {
    pub fn new(request: &pb::GenerateRequest) -> Self {
        let wanted = request.response.clone().unwrap_or_default();
        let prompt = match &request.prompt {
            Some(Prompt::TokenIds(tokens)) if wanted.prompt_token_ids || wanted.prompt_logprobs => {
                tokens.ids.clone()
            }
            _ => Vec::new(),
        };
        Self {
            token_ids: wanted.output_token_ids,
            text: wanted.output_text.unwrap_or(true),
            logprobs: wanted.output_logprobs,
            candidates: wanted.output_candidates.is_some(),
            prompt_logprobs: wanted.prompt_logprobs,
            prompt,
            stop_token_ids: request.stopping.as_ref().map_or_else(Vec::new, |s| s.stop_token_ids.clone()),
            cached_tokens: 0,
            kept: None,
            choices: BTreeMap::new(),
        }
    }

    /// The messages that an output gives.
    pub fn take(&mut self, output: Output) -> Option<Result<pb::GenerateResponse, Status>> {
        match output {
            Output::Started { usage, prompt_logprobs, .. } => {
                self.cached_tokens = usage.cached_tokens;
                let prompt_info = Some(self.prompt_info(usage.prompt_tokens, prompt_logprobs));
                Some(Ok(pb::GenerateResponse { prompt_info, outputs: None }))
            }
            Output::Delta { choice, token, events, logprobs } => {
                let state = self.choices.entry(choice).or_default();
                state.held.extend(events.into_iter().filter_map(|event| match event {
                    ReplyEvent::Text(text) => Some(text),
                    _ => None,
                }));
                let token = token?;
                state.tokens += 1;
                let text = std::mem::take(&mut state.held);
                Some(Ok(message(self.token(choice, token, text, &logprobs))))
            }
            Output::Finished { choice, finish } => {
                let state = self.choices.entry(choice).or_default();
                let (tokens, text) = (state.tokens, std::mem::take(&mut state.held));
                let finish_info = Some(self.finish_info(tokens, finish));
                let text = if self.text { text } else { String::new() };
                let index = choice as u32;
                Some(Ok(message(pb::SequenceOutput { index, text, finish_info, ..Default::default() })))
            }
            Output::Kept(params) => {
                self.kept = Some(transfer::to_struct(params));
                None
            }
            Output::Done(_) | Output::Embedding { .. } => None,
            Output::Failed(error) => Some(Err(failure(error))),
        }
    }

    fn token(
        &self,
        choice: usize,
        token: u32,
        text: String,
        logprobs: &[TokenLogprobs],
    ) -> pb::SequenceOutput {
        let logprobs = if self.logprobs { logprobs } else { &[] };
        let candidates = if self.candidates { logprobs } else { &[] };
        pb::SequenceOutput {
            index: choice as u32,
            text: if self.text { text } else { String::new() },
            num_tokens: 1,
            token_ids: if self.token_ids { vec![token] } else { Vec::new() },
            logprobs: logprobs.iter().map(|token| lower::finite(token.logprob)).collect(),
            ranks: logprobs.iter().map(rank).collect(),
            candidate_tokens: candidates.iter().map(others).collect(),
            finish_info: None,
            sampling_mask: Vec::new(),
        }
    }

    fn finish_info(&self, tokens: u32, finish: Finish) -> pb::FinishInfo {
        let reason = match finish.reason {
            "length" => FinishReason::Length,
            "abort" => FinishReason::Aborted,
            _ => FinishReason::Stop,
        };
        let stop_token = finish.stop_token.map(|token| match self.stop_token_ids.contains(&token) {
            true => StopReason::StopTokenId(token),
            false => StopReason::EosTokenId(token),
        });
        pb::FinishInfo {
            num_output_tokens: tokens,
            finish_reason: reason as i32,
            stop_reason: finish.stop.map(StopReason::StopString).or(stop_token),
            kv_transfer_params: self.kept.clone(),
            ec_transfer_params: None,
            num_cached_tokens: Some(self.cached_tokens as u32),
        }
    }

    fn prompt_info(&mut self, tokens: usize, logprobs: Option<Vec<Option<TokenLogprobs>>>) -> pb::PromptInfo {
        let mut info = pb::PromptInfo { num_prompt_tokens: tokens as u32, ..Default::default() };
        info.token_ids = std::mem::take(&mut self.prompt);
        for token in logprobs.filter(|_| self.prompt_logprobs).into_iter().flatten() {
            // The first token has none; its place must be filled.
            info.logprobs.push(token.as_ref().map_or(0.0, |token| lower::finite(token.logprob)));
            info.ranks.push(token.as_ref().map_or(0, rank));
            info.candidate_tokens.push(token.as_ref().map(others).unwrap_or_default());
        }
        info
    }
}

fn message(outputs: pb::SequenceOutput) -> pb::GenerateResponse {
    pb::GenerateResponse { prompt_info: None, outputs: Some(outputs) }
}

/// The rank of the chosen token. One that is not among the alternatives has at least the next rank,
/// which is all that is known.
fn rank(token: &TokenLogprobs) -> u32 {
    let place = token.top.iter().position(|(other, _)| *other == token.token);
    place.unwrap_or(token.top.len()) as u32 + 1
}

/// The alternatives to the chosen token.
fn others(token: &TokenLogprobs) -> pb::CandidateTokenInfo {
    let ranked = token.top.iter().zip(1..).filter(|((other, _), _)| *other != token.token);
    let tokens = ranked.map(|(&(id, logprob), rank)| TokenInfo { id, logprob: lower::finite(logprob), rank });
    pb::CandidateTokenInfo { tokens: tokens.collect() }
}

fn failure(error: RequestError) -> Status {
    match &error {
        RequestError::QueueFull { .. } => Status::resource_exhausted(error.to_string()),
        RequestError::ShuttingDown => Status::unavailable(error.to_string()),
        RequestError::Engine(_) => Status::internal(error.to_string()),
        RequestError::ContextExceeded { .. }
        | RequestError::TooLarge { .. }
        | RequestError::Form { .. }
        | RequestError::Invalid { .. } => Status::invalid_argument(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::tests::{REQUEST, decoded};
    use oscar_engine::Usage;
    use prost::Message;

    fn hex(message: &pb::GenerateResponse) -> String {
        message.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The bytes were written by Google's Python library from the published .proto files.
    #[test]
    fn messages_have_the_bytes_that_others_read() {
        let mut answer = Answer::new(&decoded(REQUEST));
        let mut take = |output| answer.take(output).map(|message| hex(&message.unwrap()));
        let usage = Usage { prompt_tokens: 3, cached_tokens: 64, ..Usage::default() };
        let started = take(Output::Started { prompt: 0, usage, prompt_logprobs: None });
        assert_eq!(started.as_deref(), Some("0a020803"));
        let text = |text: &str| vec![ReplyEvent::Text(text.to_owned())];
        let logprobs = vec![TokenLogprobs { token: 42, logprob: -0.25, top: vec![(42, -0.25), (43, -0.5)] }];
        let token = take(Output::Delta { choice: 0, token: Some(42), events: text("Hi"), logprobs });
        let expected = "121f12024869180122012a2a04000080be3201013a0b0a09082b15000000bf1802";
        assert_eq!(token.as_deref(), Some(expected));
        // Text without a token waits for the end.
        let held = Output::Delta { choice: 0, token: None, events: text("!"), logprobs: Vec::new() };
        assert_eq!(take(held), None);
        let finish = Finish { reason: "stop", stop: None, stop_token: Some(7) };
        let ended = take(Output::Finished { choice: 0, finish });
        assert_eq!(ended.as_deref(), Some("120d12012142080801100218074840"));
    }

    #[test]
    fn a_stop_token_of_the_model_is_told_from_one_of_the_client() {
        let answer = Answer::new(&decoded(REQUEST));
        let stop = |token| {
            let finish = Finish { reason: "stop", stop: None, stop_token: Some(token) };
            answer.finish_info(0, finish).stop_reason
        };
        assert_eq!(stop(7), Some(StopReason::StopTokenId(7)));
        assert_eq!(stop(8), Some(StopReason::EosTokenId(8)));
        let cut = Finish { reason: "stop", stop: Some("x".to_owned()), stop_token: None };
        assert_eq!(answer.finish_info(0, cut).stop_reason, Some(StopReason::StopString("x".to_owned())));
    }

    #[test]
    fn a_token_outside_the_alternatives_has_the_next_rank() {
        let token = TokenLogprobs { token: 9, logprob: -3.0, top: vec![(1, -0.5), (2, -1.0)] };
        assert_eq!((rank(&token), others(&token).tokens.len()), (3, 2));
    }
}

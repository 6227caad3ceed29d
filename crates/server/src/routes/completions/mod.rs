//! `POST /v1/completions`.

pub mod prepare;
pub mod types;
mod validate;

use axum::response::Response;
use oscar_engine::{Request, TokenLogprobs};
use oscar_text::ReplyEvent;
use serde_json::Value;

use self::types::{CompletionChoice, CompletionLogprobs, CompletionResponse};
use crate::app::Shared;
use crate::body::{Asked, json_answer, off_thread};
use crate::error::ApiError;
use crate::generate::{Finish, Generation, Output, Totals, finite};
use crate::routes::frame::Frame;
use crate::routes::stream::{Chunks, respond};

pub async fn create(Asked { app, name, caller, body }: Asked) -> Result<Response, ApiError> {
    let id = format!("cmpl-{name}");
    let (prepared, echo) =
        off_thread(&app, body, move |app, body| prepare::prepare(app, &name, caller, body)).await?;
    let (size, stream) = (prepared.answer_size(), prepared.stream);
    let choices = prepared.params().choices;
    let prompt = |request: &Request| request.prompt().to_vec();
    let reply = Reply {
        frame: Frame::new(&app, id, "text_completion", &prepared),
        prompt_logprobs: echo.prompt_logprobs,
        offsets: vec![0; choices * prepared.requests.len()],
        prompts: echo.texts.iter().flat_map(|_| prepared.requests.iter().map(prompt)).collect(),
        echo: echo.texts,
        choices,
        totals: Totals::default(),
        kept: None,
    };
    let generation = Generation::start(&app, prepared)?;
    if stream {
        return Ok(respond(app, generation, reply));
    }
    let response = collect(&app, generation, reply).await?;
    json_answer(&app, size, response).await
}

/// Turns outputs into pieces of choices, which are the chunks of a stream or are joined into one
/// response.
struct Reply {
    frame: Frame,
    prompt_logprobs: bool,
    /// The prompts as text and as tokens, if they are repeated.
    echo: Option<Vec<String>>,
    prompts: Vec<Vec<u32>>,
    choices: usize,
    /// Where the next token of each choice begins.
    offsets: Vec<usize>,
    totals: Totals,
    /// The `kv_transfer_params` of the answer.
    kept: Option<Value>,
}

impl Reply {
    fn pieces(&mut self, output: Output) -> Vec<CompletionChoice> {
        match output {
            Output::Started { prompt, prompt_logprobs, .. } => self.openings(prompt, prompt_logprobs),
            Output::Delta { choice, events, logprobs, .. } => {
                let content = text_of(events);
                if content.is_empty() && logprobs.is_empty() {
                    return Vec::new();
                }
                let logprobs = self.frame.logprobs.then(|| self.token_logprobs(choice, &logprobs));
                vec![CompletionChoice { logprobs, ..piece(choice, content) }]
            }
            Output::Finished { choice, finish: Finish { reason, stop, .. } } => {
                let finish_reason = Some(reason);
                vec![CompletionChoice { finish_reason, stop_reason: stop, ..piece(choice, String::new()) }]
            }
            Output::Done(totals) => {
                self.totals += totals;
                Vec::new()
            }
            Output::Kept(params) => {
                self.kept = Some(params);
                Vec::new()
            }
            Output::Embedding { .. } | Output::Failed(_) => Vec::new(),
        }
    }

    /// The first pieces of a prompt's choices: the prompt, where it is repeated, and its
    /// log-probabilities.
    fn openings(
        &mut self,
        prompt: usize,
        found: Option<Vec<Option<TokenLogprobs>>>,
    ) -> Vec<CompletionChoice> {
        let echo = self.echo.as_ref().map(|texts| texts[prompt].clone());
        let numbers = prompt * self.choices..(prompt + 1) * self.choices;
        let mut pieces: Vec<CompletionChoice> = match &echo {
            Some(text) => numbers.map(|choice| self.echo(choice, prompt, text, found.as_deref())).collect(),
            None => Vec::new(),
        };
        if let Some(tokens) = found.filter(|_| self.prompt_logprobs) {
            if pieces.is_empty() {
                pieces.push(piece(prompt * self.choices, String::new()));
            }
            pieces[0].prompt_logprobs = Some(self.frame.texts.prompt_logprobs(tokens));
        }
        pieces
    }

    /// The repeated prompt of one choice.
    fn echo(
        &mut self,
        choice: usize,
        prompt: usize,
        text: &str,
        found: Option<&[Option<TokenLogprobs>]>,
    ) -> CompletionChoice {
        let found = found.filter(|_| self.frame.logprobs);
        let logprobs = found.map(|found| self.echoed_logprobs(choice, prompt, found));
        CompletionChoice { logprobs, ..piece(choice, text.to_owned()) }
    }

    fn echoed_logprobs(
        &mut self,
        choice: usize,
        prompt: usize,
        found: &[Option<TokenLogprobs>],
    ) -> CompletionLogprobs {
        let mut lists = CompletionLogprobs::default();
        for (index, token) in self.prompts[prompt].clone().into_iter().enumerate() {
            let logprobs = found.get(index).and_then(Option::as_ref);
            self.add_token(&mut lists, choice, token, logprobs);
        }
        lists
    }

    fn token_logprobs(&mut self, choice: usize, tokens: &[TokenLogprobs]) -> CompletionLogprobs {
        let mut lists = CompletionLogprobs::default();
        for logprobs in tokens {
            self.add_token(&mut lists, choice, logprobs.token, Some(logprobs));
        }
        lists
    }

    fn add_token(
        &mut self,
        lists: &mut CompletionLogprobs,
        choice: usize,
        token: u32,
        logprobs: Option<&TokenLogprobs>,
    ) {
        let text = self.frame.texts.text(token);
        lists.text_offset.push(self.offsets[choice]);
        self.offsets[choice] += text.chars().count();
        lists.tokens.push(text);
        lists.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.logprob)));
        lists.top_logprobs.push(logprobs.map(|logprobs| self.frame.texts.completion_entry(logprobs.clone())));
    }
}

/// The text of an answer, in which nothing else is looked for.
fn text_of(events: Vec<ReplyEvent>) -> String {
    let text = |event| match event {
        ReplyEvent::Text(text) => Some(text),
        _ => None,
    };
    events.into_iter().filter_map(text).collect()
}

fn piece(index: usize, text: String) -> CompletionChoice {
    CompletionChoice {
        index,
        text,
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        prompt_logprobs: None,
    }
}

async fn collect(
    app: &Shared,
    mut generation: Generation,
    mut reply: Reply,
) -> Result<CompletionResponse, ApiError> {
    let mut choices: Vec<CompletionChoice> =
        (0..reply.offsets.len()).map(|index| piece(index, String::new())).collect();
    while let Some(output) = generation.next().await {
        if let Output::Failed(error) = output {
            return Err(app.engine_error(error));
        }
        for piece in reply.pieces(output) {
            join(&mut choices[piece.index], piece);
        }
    }
    for choice in &mut choices {
        choice.finish_reason.get_or_insert("abort");
        if reply.frame.logprobs {
            choice.logprobs.get_or_insert_default();
        }
    }
    let mut response = reply.frame.chunk(choices);
    response.usage = Some(Some(reply.totals.into()));
    response.kv_transfer_params = reply.kept;
    Ok(response)
}

fn join(choice: &mut CompletionChoice, piece: CompletionChoice) {
    choice.text += &piece.text;
    choice.finish_reason = piece.finish_reason.or(choice.finish_reason);
    choice.stop_reason = piece.stop_reason.or(choice.stop_reason.take());
    choice.prompt_logprobs = piece.prompt_logprobs.or(choice.prompt_logprobs.take());
    if let Some(more) = piece.logprobs {
        let lists = choice.logprobs.get_or_insert_default();
        lists.tokens.extend(more.tokens);
        lists.token_logprobs.extend(more.token_logprobs);
        lists.top_logprobs.extend(more.top_logprobs);
        lists.text_offset.extend(more.text_offset);
    }
}

impl Chunks for Reply {
    type Chunk = CompletionResponse;

    fn chunks(&mut self, output: Output) -> Vec<CompletionResponse> {
        self.pieces(output).into_iter().map(|piece| self.frame.chunk(vec![piece])).collect()
    }

    fn last(&mut self) -> Vec<CompletionResponse> {
        self.frame.last(self.totals)
    }
}

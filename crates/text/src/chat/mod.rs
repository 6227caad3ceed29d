//! Chat templates: messages to the prompt text a model was trained on.
//!
//! Invariant: for the same template and input the text equals what Hugging Face `transformers`
//! renders with Jinja2, character by character. A model sees a wrong space as a different language,
//! so fidelity is judged by golden files (`tests/fixtures`), not by looks.
//!
//! The engine is `minijinja`. This module adds what Python brings to Jinja2: `tojson` as
//! `json.dumps` ([`json`]), printing and string methods ([`python`]), the clock ([`clock`]) and the
//! `generation` tag ([`syntax`]).
//!
//! A template may come from a stranger: steps, recursion and memory are bounded ([`limits`]).

mod clock;
mod instrument;
mod json;
mod limits;
mod python;
mod syntax;

use std::error::Error as _;
use std::fmt;
use std::time::SystemTime;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::{Map, Value as Json};

use crate::config::kind;
use crate::{Dialect, NamedTemplate, SpecialTokens, TextError};

/// Template steps allowed for one rendering, those that charge for memory included: a second or so,
/// some 25,000 messages of a busy template.
const STEPS: u64 = 20_000_000;

/// Products that a template may contain. Those of constants are computed while it is compiled,
/// each up to 100 MB.
const PRODUCTS: usize = 8;

/// Nested macro calls allowed; far below what a 2 MiB thread stack holds.
const RECURSION: usize = 120;

/// The template `transformers` prefers when tools are given.
const TOOL_USE: &str = "tool_use";

/// The chat template or templates of a model, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    names: Vec<String>,
    steps: u64,
}

/// The input of a template for one conversation.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A list of message objects.
    pub messages: &'a Json,
    /// A list of tool descriptions, or none.
    pub tools: Option<&'a Json>,
    /// A list of documents for retrieval templates, or none.
    pub documents: Option<&'a Json>,
    /// Ends the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further template variables, such as `enable_thinking`; they may replace special tokens.
    pub extra: Option<&'a Map<String, Json>>,
    /// Name of the template; by default `tool_use` when there are tools and such a template, else
    /// `default`.
    pub template: Option<&'a str>,
}

impl<'a> ChatInput<'a> {
    /// Messages to be answered: no tools, no documents, generation prompt on.
    pub fn new(messages: &'a Json) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            extra: None,
            template: None,
        }
    }
}

impl ChatTemplate {
    /// Compiles the templates of a model. Of two templates with the same name the later one counts.
    pub fn new(templates: &[NamedTemplate], special: &SpecialTokens) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_recursion_limit(RECURSION);
        environment.set_fuel(Some(STEPS));
        python::install(&mut environment);
        limits::install(&mut environment);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Raised { message }))
        });

        let mut names: Vec<String> = Vec::new();
        for template in templates {
            let source = syntax::without_generation_tags(&template.source);
            let refused =
                |line, reason| TextError::TemplateSyntax { template: template.name.clone(), line, reason };
            if instrument::products(&source) > PRODUCTS {
                return Err(refused(1, format!("it has more than {PRODUCTS} products")));
            }
            environment
                .add_template_owned(template.name.clone(), source)
                .map_err(|error| refused(error.line().unwrap_or(1), reason(&error)))?;
            let added = environment.get_template(&template.name);
            if let Some(line) = added.ok().and_then(|added| instrument::other_template(&added)) {
                let reason = "there are no other templates to include, import or extend".to_owned();
                return Err(refused(line, reason));
            }
            if !names.contains(&template.name) {
                names.push(template.name.clone());
            }
        }
        if names.is_empty() {
            return Err(TextError::NoChatTemplate);
        }
        let chat = Self { environment, special: special.clone(), names, steps: STEPS };
        Ok(chat.with_clock(SystemTime::now))
    }

    /// Compiles a single template.
    pub fn from_source(source: &str, special: &SpecialTokens) -> Result<Self, TextError> {
        Self::new(&[NamedTemplate::unnamed(source)], special)
    }

    /// Replaces the clock behind `strftime_now`. Times are told in UTC.
    pub fn with_clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.environment.add_function("strftime_now", move |format: String| clock::strftime(&format, now()));
        self
    }

    /// Replaces the bound on template steps.
    pub fn with_step_limit(mut self, steps: u64) -> Self {
        self.environment.set_fuel(Some(steps));
        self.steps = steps;
        self
    }

    /// Names of the templates, in the order given.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The dialect in which the model writes tool calls, as its templates show it.
    pub fn dialect(&self) -> Option<Dialect> {
        let sources = self.names.iter().filter_map(|name| self.environment.get_template(name).ok());
        sources.filter_map(|template| Dialect::of_template(template.source())).next()
    }

    /// Whether the template prints tools. One that does not leaves the model ignorant of them.
    pub fn prints_tools(&self) -> bool {
        let prints = |name: &String| {
            self.environment
                .get_template(name)
                .is_ok_and(|template| template.undeclared_variables(false).contains("tools"))
        };
        self.names.iter().any(prints)
    }

    /// Whether a template contains `text`, such as a tag that it prints.
    pub fn mentions(&self, text: &str) -> bool {
        let sources = self.names.iter().filter_map(|name| self.environment.get_template(name).ok());
        sources.into_iter().any(|template| template.source().contains(text))
    }

    /// Renders the prompt.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        expect_list("messages", Some(input.messages))?;
        expect_list("tools", input.tools)?;
        expect_list("documents", input.documents)?;
        let name = self.choose(input)?;
        let template = self.environment.get_template(name).map_err(|error| self.explain(name, &error))?;
        let (steps, blocks) = instrument::instrument(&template);
        let variables = self.variables(input)?;
        let mut text = String::new();
        limits::begin();
        let mut output = make_string_output(&mut text);
        let vm = Vm::new(&self.environment);
        let outcome = vm.eval(&steps, variables, &blocks, &mut output, AutoEscape::None).map(drop);
        outcome.map_err(|error| self.explain(name, &error))?;
        Ok(text)
    }

    fn choose<'n>(&'n self, input: &ChatInput<'n>) -> Result<&'n str, TextError> {
        let has = |name: &str| self.names.iter().any(|known| known == name);
        let name = match input.template {
            Some(name) => name,
            None if input.tools.is_some() && has(TOOL_USE) => TOOL_USE,
            None => NamedTemplate::DEFAULT,
        };
        match has(name) {
            true => Ok(name),
            false => {
                Err(TextError::UnknownTemplate { name: name.to_owned(), available: self.names.join(", ") })
            }
        }
    }

    /// The template's variables. As in `transformers`, absent tools and documents are none rather
    /// than undefined, while a special token that the model lacks is undefined.
    fn variables(&self, input: &ChatInput<'_>) -> Result<Value, TextError> {
        let mut variables: Vec<(String, Value)> = Vec::new();
        for (role, token) in self.special.named() {
            variables.push((role.to_owned(), Value::from(token)));
        }
        if !self.special.additional().is_empty() {
            let tokens = Value::from(self.special.additional().to_vec());
            variables.push(("additional_special_tokens".to_owned(), tokens));
        }
        for (name, value) in input.extra.into_iter().flatten() {
            if ["messages", "tools", "documents", "add_generation_prompt"].contains(&name.as_str()) {
                return Err(TextError::ReservedVariable { name: name.clone() });
            }
            variables.push((name.clone(), Value::from_serialize(value)));
        }
        let or_none = |value: Option<&Json>| value.map_or(Value::from(()), Value::from_serialize);
        variables.push(("messages".to_owned(), Value::from_serialize(input.messages)));
        variables.push(("tools".to_owned(), or_none(input.tools)));
        variables.push(("documents".to_owned(), or_none(input.documents)));
        variables.push(("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)));
        Ok(variables.into_iter().collect())
    }

    fn explain(&self, template: &str, error: &minijinja::Error) -> TextError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
        while let Some(inner) = cause {
            if let Some(raised) = inner.downcast_ref::<Raised>() {
                return TextError::TemplateRaised { message: raised.message.clone() };
            }
            cause = inner.source();
        }
        let (template, line) = (template.to_owned(), error.line().unwrap_or(1));
        match error.kind() {
            ErrorKind::OutOfFuel => TextError::TemplateTooLong { template, line, steps: self.steps },
            _ => TextError::TemplateRender { template, line, reason: reason(error) },
        }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("names", &self.names).field("steps", &self.steps).finish()
    }
}

/// Marks an error as the template's own, so that its text reaches the client unchanged.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct Raised {
    message: String,
}

/// The engine's message without the position, which our own message already gives.
fn reason(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn expect_list(name: &'static str, value: Option<&Json>) -> Result<(), TextError> {
    match value {
        None | Some(Json::Array(_)) => Ok(()),
        Some(other) => Err(TextError::ChatInput { name, expected: "a list", found: kind(other) }),
    }
}

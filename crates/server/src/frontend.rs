//! The way from a request to its answer for other protocols than HTTP.

use oscar_engine::{EngineApi, EngineInfo};
use oscar_text::ModelText;
use serde_json::{Map, Value};
use std::sync::Arc;

use crate::app::{App, Shared};
use crate::body::prepared;
use crate::error::ApiError;
use crate::generate::Generation;
use crate::keys::Caller;
use crate::routes::completions::prepare::prepare_fields;
use crate::routes::completions::types::CompletionBody;
use crate::schema::RequestBody;
use crate::{GenerationDefaults, ServerConfig};

/// The running server without its sockets. Clones are the same one: whatever the protocol, requests
/// share limits, metrics and the drain.
#[derive(Clone)]
pub struct Frontend {
    pub(crate) app: Shared,
}

impl Frontend {
    pub fn new(
        config: ServerConfig,
        engine: Arc<dyn EngineApi>,
        text: Arc<ModelText>,
        defaults: GenerationDefaults,
    ) -> Self {
        Self { app: App::new(config, engine, text, defaults) }
    }

    pub fn engine_info(&self) -> &EngineInfo {
        self.app.engine.info()
    }

    /// Names the model answers to besides its own.
    pub fn model_aliases(&self) -> &[String] {
        &self.app.config.model_aliases
    }

    /// A name for a request that came without one.
    pub fn new_name(&self) -> String {
        self.app.ids.name()
    }

    /// Bytes of the largest request: a prompt of the whole context as text or as tokens of five bytes,
    /// and something for the other fields.
    pub fn largest_message(&self) -> usize {
        const OTHERS: usize = 1 << 20;
        let tokens = self.engine_info().context.saturating_mul(5);
        let text = self.app.limits.prompt_bytes.min(self.app.limits.body_bytes);
        tokens.max(text).saturating_add(OTHERS)
    }

    /// Starts a completion whose fields have the names of `POST /v1/completions`. The caller is
    /// trusted: no key is asked for.
    ///
    /// # Errors
    /// Names the field that is wrong, or says that the request cannot be taken now.
    pub async fn complete(&self, name: &str, fields: Map<String, Value>) -> Result<Generation, ApiError> {
        let (app, name) = (self.app.clone(), name.to_owned());
        let request = prepared(&self.app, move || {
            let body = CompletionBody::from_object(fields)?;
            prepare_fields(&app, &name, Caller::default(), body)
        });
        let (request, _) = request.await?;
        Generation::start(&self.app, request)
    }

    /// Ends the requests of that name; unknown ones end nothing.
    pub fn abort(&self, name: &str) {
        for id in self.app.running.find(name, &Caller::default()) {
            self.app.engine.cancel(id);
        }
    }
}

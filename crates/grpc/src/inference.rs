//! `vllm.Inference`: streams of tokens. A stream that its reader drops cancels the request.

use crate::answer::Answer;
use crate::lower;
use futures_core::Stream;
use oscar_server::{Frontend, Generation};
use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::{Request, Response, Status};
use vllm_proto as pb;

pub struct InferenceService {
    frontend: Frontend,
}

impl InferenceService {
    pub fn new(frontend: Frontend) -> Self {
        Self { frontend }
    }
}

#[tonic::async_trait]
impl pb::inference_server::Inference for InferenceService {
    type GenerateStreamStream = Messages;

    async fn generate(
        &self,
        _: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::GenerateResponse>, Status> {
        Err(Status::unimplemented("generate is not supported; use GenerateStream"))
    }

    async fn generate_stream(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Messages>, Status> {
        let mut request = request.into_inner();
        if request.request_id.is_empty() {
            request.request_id = self.frontend.new_name();
        }
        let name = std::mem::take(&mut request.request_id);
        let answer = Answer::new(&request);
        let fields = lower::fields(request, self.frontend.engine_info())?;
        let generation =
            self.frontend.complete(&name, fields).await.map_err(|error| lower::status(&error))?;
        Ok(Response::new(Messages { generation, answer, ready: VecDeque::new() }))
    }
}

/// The messages of one request.
pub struct Messages {
    generation: Generation,
    answer: Answer,
    ready: VecDeque<Result<pb::GenerateResponse, Status>>,
}

impl Stream for Messages {
    type Item = Result<pb::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(message) = this.ready.pop_front() {
                return Poll::Ready(Some(message));
            }
            match this.generation.poll_next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(output)) => this.ready.extend(this.answer.take(output)),
            }
        }
    }
}

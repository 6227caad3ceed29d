//! `vllm.Control`: facts about the server and its model, and aborts. Everything else of that service
//! belongs to features that do not exist here.

use crate::serve::GrpcConfig;
use oscar_server::Frontend;
use std::pin::Pin;
use tonic::{Request, Response, Status};
use vllm_proto as pb;

pub struct ControlService {
    frontend: Frontend,
    config: GrpcConfig,
    /// Names this process until it ends.
    instance: String,
}

impl ControlService {
    pub fn new(frontend: Frontend, config: GrpcConfig) -> Self {
        let instance = frontend.new_name();
        Self { frontend, config, instance }
    }
}

/// Calls that are answered with UNIMPLEMENTED. `async_trait` does not look into macros, so this is the
/// form that it gives a method.
macro_rules! not_implemented {
    ($($name:ident($request:ident) -> $response:ident;)+) => {
        $(fn $name<'this, 'call>(
            &'this self,
            _: Request<pb::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<pb::$response>, Status>> + Send + 'call>>
        where
            'this: 'call,
            Self: 'call,
        {
            Box::pin(async { Err(Status::unimplemented(concat!(stringify!($name), " is not supported"))) })
        })+
    };
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[tonic::async_trait]
impl pb::control_server::Control for ControlService {
    async fn get_server_info(
        &self,
        _: Request<pb::GetServerInfoRequest>,
    ) -> Result<Response<pb::ServerInfo>, Status> {
        let info = self.frontend.engine_info();
        Ok(Response::new(pb::ServerInfo {
            engine_version: format!("oscar-{}", env!("CARGO_PKG_VERSION")),
            // Dynamo accepts no other.
            api_version: "vllm".to_owned(),
            instance_id: self.instance.clone(),
            parallelism: Some(pb::ParallelismInfo {
                tensor_parallel_size: small(info.ranks),
                pipeline_parallel_size: 1,
                data_parallel_size: 1,
                data_parallel_rank: 0,
                decode_context_parallel_size: 1,
                world_size: info.ranks as u64,
                data_parallel_size_local: 1,
            }),
            max_model_len: small(info.context),
            kv_block_size: small(info.page_tokens),
            total_kv_blocks: info.most_pages() as u64,
            max_running_requests: self.config.max_running_requests as u64,
            max_batched_tokens: self.config.max_batched_tokens as u64,
            max_loras: 0,
            rl_capabilities: None,
            proto_version: pb::VERSION.to_owned(),
            effective_attention_block_size: Some(info.page_tokens as u64),
        }))
    }

    async fn get_model_info(
        &self,
        _: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::ModelInfo>, Status> {
        Ok(Response::new(pb::ModelInfo {
            model_id: self.config.model_id.clone(),
            served_model_name: self.frontend.engine_info().model.clone(),
            served_model_aliases: self.frontend.model_aliases().to_vec(),
            supports_text_input: true,
            supports_token_ids_input: true,
            supports_lora: false,
            supports_multimodal: false,
            // The text that goes out is not parsed.
            reasoning_parser: String::new(),
            tool_call_parser: String::new(),
        }))
    }

    async fn get_kv_event_sources(
        &self,
        _: Request<pb::GetKvEventSourcesRequest>,
    ) -> Result<Response<pb::GetKvEventSourcesResponse>, Status> {
        let source = |source: &crate::KvEventSource| pb::KvEventSource {
            transport: "zmq".to_owned(),
            endpoint: source.endpoint.clone(),
            topic: source.topic.clone(),
            replay_endpoint: source.replay_endpoint.clone(),
            data_parallel_rank: Some(0),
            encoding: "msgpack".to_owned(),
            schema_version: 1,
            buffer_steps: small(source.buffer_steps),
            hwm: small(source.high_water_mark),
            max_queue_size: small(source.high_water_mark),
        };
        let sources = self.config.kv_events.iter().map(source).collect();
        Ok(Response::new(pb::GetKvEventSourcesResponse { sources }))
    }

    async fn abort(&self, request: Request<pb::AbortRequest>) -> Result<Response<pb::AbortResponse>, Status> {
        for name in &request.get_ref().request_ids {
            self.frontend.abort(name);
        }
        Ok(Response::new(pb::AbortResponse {}))
    }

    not_implemented! {
        shutdown(ShutdownRequest) -> ShutdownResponse;
        load_lora(LoadLoraRequest) -> LoadLoraResponse;
        unload_lora(UnloadLoraRequest) -> UnloadLoraResponse;
        list_loras(ListLorasRequest) -> ListLorasResponse;
        pause_generation(PauseGenerationRequest) -> PauseGenerationResponse;
        resume_generation(ResumeGenerationRequest) -> ResumeGenerationResponse;
        is_paused(IsPausedRequest) -> IsPausedResponse;
        sleep(SleepRequest) -> SleepResponse;
        wake_up(WakeUpRequest) -> WakeUpResponse;
        is_sleeping(IsSleepingRequest) -> IsSleepingResponse;
        init_weight_transfer_engine(InitWeightTransferEngineRequest) -> InitWeightTransferEngineResponse;
        start_weight_update(StartWeightUpdateRequest) -> StartWeightUpdateResponse;
        start_draft_weight_update(StartDraftWeightUpdateRequest) -> StartDraftWeightUpdateResponse;
        update_weights(UpdateWeightsRequest) -> UpdateWeightsResponse;
        finish_weight_update(FinishWeightUpdateRequest) -> FinishWeightUpdateResponse;
        update_weight_version(UpdateWeightVersionRequest) -> UpdateWeightVersionResponse;
        get_weight_version(GetWeightVersionRequest) -> GetWeightVersionResponse;
    }
}

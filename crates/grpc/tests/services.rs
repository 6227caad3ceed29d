//! The services over a real engine on the embedded model, as a gRPC client sees them.

use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use oscar_engine::{Engine, EngineApi, EngineOptions};
use oscar_grpc::{GrpcConfig, KvEventSource, serve};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, ModelSource, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions};
use oscar_server::{Frontend, GenerationDefaults, ServerConfig};
use oscar_text::ModelText;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use vllm_proto as pb;
use vllm_proto::control_client::ControlClient;
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::inference_client::InferenceClient;

const PATIENCE: Duration = Duration::from_secs(60);
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

fn engine(options: EngineOptions) -> Arc<dyn EngineApi> {
    let source = ModelSource::Embedded(oscar_embedded::FILES);
    let config = DecoderConfig::load(&source).unwrap();
    let weights = Weights::open(&source).unwrap();
    let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
    let windows = Windows::default();
    let layout = CacheLayout::new(KvFormat::Bf16, l, h, d, windows, CodeLayout::CpuTile).unwrap();
    let backend = CpuBackend::new(Kernels::chosen().unwrap(), 1, Mode::Bf16).unwrap();
    let options_of_runner = RunnerOptions {
        layout,
        rotations: None,
        context: 4096,
        kv_memory: KvMemory::Bytes(256 << 20),
        prefill_chunk: 512,
    };
    let runner = Runner::load(backend, &config, &weights, options_of_runner, |_| {}).unwrap();
    Arc::new(Engine::start(runner, options).unwrap())
}

/// A server on a free port; ends with the test.
struct Server {
    engine: Arc<dyn EngineApi>,
    channel: Channel,
    text: Arc<ModelText>,
    drain: Option<oneshot::Sender<()>>,
    _stop: oneshot::Sender<()>,
}

impl Server {
    async fn start(options: EngineOptions) -> Self {
        let engine = engine(options);
        let file = |name: &str| oscar_embedded::FILES.iter().find(|(known, _)| *known == name).unwrap().1;
        let tokenizer = file("tokenizer.json");
        let text =
            Arc::new(ModelText::from_files(tokenizer, Some(file("tokenizer_config.json")), None).unwrap());
        let defaults = GenerationDefaults { stop_tokens: vec![2], ..Default::default() };
        let config = ServerConfig { model_aliases: vec!["org/alias".into()], ..Default::default() };
        let frontend = Frontend::new(config, engine.clone(), text.clone(), defaults);
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let kv_events = Some(KvEventSource {
            endpoint: "tcp://*:5557".into(),
            replay_endpoint: "tcp://*:5558".into(),
            topic: "t".into(),
            buffer_steps: 10,
            high_water_mark: 20,
        });
        let config = GrpcConfig {
            model_id: "/models/m".into(),
            max_running_requests: 8,
            max_batched_tokens: 512,
            kv_events,
        };
        let (drain, draining) = oneshot::channel::<()>();
        let (_stop, stopped) = oneshot::channel::<()>();
        let ended = |signal: oneshot::Receiver<()>| async move { drop(signal.await) };
        tokio::spawn(serve(listener, frontend, config, ended(draining), ended(stopped)));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        Self { engine, channel, text, drain: Some(drain), _stop }
    }

    fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone())
    }

    async fn stream(&self, request: pb::GenerateRequest) -> Result<Streaming<pb::GenerateResponse>, Status> {
        InferenceClient::new(self.channel.clone()).generate_stream(request).await.map(|r| r.into_inner())
    }

    async fn generate(&self, request: pb::GenerateRequest) -> Result<Answer, Status> {
        let mut stream = self.stream(request).await?;
        let mut answer = Answer::default();
        while let Some(message) = stream.message().await? {
            answer.take(message);
        }
        assert!(answer.finish.is_some(), "a stream ends with finish_info");
        Ok(answer)
    }

    async fn health(&self, service: &str) -> Result<i32, Status> {
        let request = HealthCheckRequest { service: service.to_owned() };
        HealthClient::new(self.channel.clone()).check(request).await.map(|answer| answer.into_inner().status)
    }
}

/// All messages of a stream, with the checks that Dynamo's sidecar makes.
#[derive(Default)]
struct Answer {
    prompt: Option<pb::PromptInfo>,
    tokens: Vec<u32>,
    text: String,
    logprobs: Vec<f32>,
    candidates: Vec<pb::CandidateTokenInfo>,
    finish: Option<pb::FinishInfo>,
}

impl Answer {
    fn take(&mut self, message: pb::GenerateResponse) {
        assert!(self.finish.is_none(), "nothing follows finish_info");
        if let Some(info) = message.prompt_info {
            assert!(self.prompt.is_none() && self.tokens.is_empty(), "in the first message alone");
            self.prompt = Some(info);
        }
        let Some(output) = message.outputs else { return };
        assert_eq!(output.num_tokens as usize, output.token_ids.len());
        assert!(output.num_tokens > 0 || output.finish_info.is_some(), "text alone would be dropped");
        assert_eq!(output.logprobs.len(), output.ranks.len());
        self.tokens.extend(output.token_ids);
        self.text += &output.text;
        self.logprobs.extend(output.logprobs);
        self.candidates.extend(output.candidate_tokens);
        if let Some(finish) = &output.finish_info {
            assert_eq!(finish.num_output_tokens as usize, self.tokens.len());
        }
        self.finish = output.finish_info;
    }

    fn finish(&self) -> (FinishReason, Option<StopReason>) {
        let finish = self.finish.as_ref().unwrap();
        (finish.finish_reason(), finish.stop_reason.clone())
    }
}

fn request(tokens: Vec<u32>, most: u32) -> pb::GenerateRequest {
    pb::GenerateRequest {
        request_id: "r".into(),
        prompt: Some(pb::generate_request::Prompt::TokenIds(pb::TokenIds { ids: tokens })),
        temperature: Some(0.0),
        stopping: Some(pb::StoppingCriteria { max_new_tokens: most, ignore_eos: true, ..Default::default() }),
        response: Some(pb::ResponseOptions { output_token_ids: true, ..Default::default() }),
        ..Default::default()
    }
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 100 + i * 37 % 4000).collect()
}

#[tokio::test]
async fn the_server_describes_itself_as_the_sidecar_wants() {
    let mut server = Server::start(EngineOptions::new("oscar-15m")).await;
    for service in ["vllm.Control", "vllm.Inference", ""] {
        assert_eq!(server.health(service).await.unwrap(), SERVING, "{service}");
    }
    assert_eq!(server.health("vllm.Other").await.unwrap_err().code(), Code::NotFound);
    let mut control = server.control();
    let info = control.get_server_info(pb::GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.api_version.as_str(), info.kv_block_size, info.max_model_len), ("vllm", 64, 4096));
    assert_eq!((info.max_running_requests, info.max_batched_tokens), (8, 512));
    assert_eq!(info.total_kv_blocks, server.engine.info().most_pages() as u64);
    let ranks = info.parallelism.as_ref().unwrap();
    assert_eq!((ranks.data_parallel_size, ranks.data_parallel_size_local, ranks.world_size), (1, 1, 1));
    let again = control.get_server_info(pb::GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(again, info, "identity does not change");
    let model = control.get_model_info(pb::GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((model.model_id.as_str(), model.served_model_name.as_str()), ("/models/m", "oscar-15m"));
    assert!(model.supports_token_ids_input && model.served_model_aliases == ["org/alias"]);
    let sources = control.get_kv_event_sources(pb::GetKvEventSourcesRequest {}).await.unwrap().into_inner();
    let source = &sources.sources[0];
    assert_eq!((source.transport.as_str(), source.endpoint.as_str()), ("zmq", "tcp://*:5557"));
    assert_eq!((source.encoding.as_str(), source.schema_version, source.hwm), ("msgpack", 1, 20));
    for code in [
        control.shutdown(pb::ShutdownRequest {}).await.unwrap_err().code(),
        control.is_sleeping(pb::IsSleepingRequest {}).await.unwrap_err().code(),
        control.list_loras(pb::ListLorasRequest {}).await.unwrap_err().code(),
    ] {
        assert_eq!(code, Code::Unimplemented);
    }
    // Draining is told, and running work goes on.
    server.drain.take().unwrap().send(()).unwrap();
    tokio::time::timeout(PATIENCE, async {
        while server.health("vllm.Inference").await.unwrap() != NOT_SERVING {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    server.generate(request(tokens(5), 2)).await.unwrap();
    server.engine.drain();
    assert_eq!(server.generate(request(tokens(5), 2)).await.err().unwrap().code(), Code::Unavailable);
}

#[tokio::test]
async fn tokens_come_back_with_text_and_counts() {
    let server = Server::start(EngineOptions::new("oscar-15m")).await;
    let cold = server.generate(request(tokens(200), 20)).await.unwrap();
    assert_eq!(cold.prompt.as_ref().unwrap().num_prompt_tokens, 200);
    assert_eq!(cold.finish(), (FinishReason::Length, None));
    assert_eq!((cold.tokens.len(), cold.finish.as_ref().unwrap().num_cached_tokens), (20, Some(0)));
    assert_eq!(cold.text, server.text.tokenizer.decode(&cold.tokens, true).unwrap());
    let hit = server.generate(request(tokens(200), 20)).await.unwrap();
    assert_eq!((&hit.tokens, &hit.text), (&cold.tokens, &cold.text), "a hit changes nothing");
    assert_eq!(hit.finish.as_ref().unwrap().num_cached_tokens, Some(192));
    // Another salt shares nothing.
    let kv = Some(pb::KvCacheParameters { cache_salt: "tenant".into(), ..Default::default() });
    let salted = server.generate(pb::GenerateRequest { kv, ..request(tokens(200), 20) }).await.unwrap();
    assert_eq!((&salted.tokens, salted.finish.as_ref().unwrap().num_cached_tokens), (&cold.tokens, Some(0)));

    // A stop token ends the answer and is not delivered.
    let mut stopping = request(tokens(200), 20);
    stopping.stopping.as_mut().unwrap().stop_token_ids = vec![cold.tokens[6]];
    let stopped = server.generate(stopping).await.unwrap();
    let first = cold.tokens.iter().position(|token| *token == cold.tokens[6]).unwrap();
    assert_eq!(stopped.tokens, cold.tokens[..first]);
    assert_eq!(stopped.finish(), (FinishReason::Stop, Some(StopReason::StopTokenId(cold.tokens[6]))));

    // A stop string across tokens.
    let middle: String = cold.text.chars().skip(8).take(4).collect();
    let mut stopping = request(tokens(200), 20);
    stopping.stopping.as_mut().unwrap().stop_strings = vec![middle.clone()];
    let stopped = server.generate(stopping).await.unwrap();
    assert_eq!(stopped.text, cold.text[..cold.text.find(&middle).unwrap()]);
    assert_eq!(stopped.finish(), (FinishReason::Stop, Some(StopReason::StopString(middle))));
}

#[tokio::test]
async fn log_probabilities_are_there_for_every_token() {
    let server = Server::start(EngineOptions::new("oscar-15m")).await;
    let mut wanted = request(tokens(10), 6);
    let top = |count| Some(pb::CandidateTokens { select: Some(pb::candidate_tokens::Select::TopN(count)) });
    wanted.response = Some(pb::ResponseOptions {
        output_token_ids: true,
        output_logprobs: true,
        output_candidates: top(3),
        prompt_logprobs: true,
        prompt_candidates: top(2),
        ..Default::default()
    });
    let answer = server.generate(wanted).await.unwrap();
    assert_eq!((answer.logprobs.len(), answer.candidates.len()), (6, 6));
    for (chosen, candidates) in answer.logprobs.iter().zip(&answer.candidates) {
        assert_eq!(candidates.tokens.len(), 2, "the chosen token is greedy and one of the three");
        assert!(candidates.tokens.iter().all(|other| other.logprob <= *chosen && other.rank > 1));
    }
    let prompt = answer.prompt.unwrap();
    let lengths =
        [prompt.token_ids.len(), prompt.logprobs.len(), prompt.ranks.len(), prompt.candidate_tokens.len()];
    assert_eq!(lengths, [10; 4]);
    assert!(prompt.logprobs[1..].iter().all(|logprob| *logprob < 0.0));
}

#[tokio::test]
async fn aborted_and_dropped_streams_reach_the_engine() {
    let server = Server::start(EngineOptions::new("oscar-15m")).await;
    let cancelled = |count: u64| {
        let engine = server.engine.clone();
        tokio::time::timeout(PATIENCE, async move {
            while engine.stats().cancelled < count || engine.stats().running > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    let mut stream = server.stream(request(tokens(5), 4000)).await.unwrap();
    stream.message().await.unwrap().unwrap();
    let request_ids = vec!["unknown".into(), "r".into()];
    server.control().abort(pb::AbortRequest { request_ids }).await.unwrap();
    let mut answer = Answer::default();
    while let Some(message) = stream.message().await.unwrap() {
        answer.take(message);
    }
    assert_eq!(answer.finish(), (FinishReason::Aborted, None));
    cancelled(1).await.unwrap();
    let mut stream = server.stream(request(tokens(5), 4000)).await.unwrap();
    stream.message().await.unwrap().unwrap();
    drop(stream);
    cancelled(2).await.unwrap();
}

#[tokio::test]
async fn refusals_have_the_right_code_and_name_the_field() {
    let server = Server::start(EngineOptions { max_queue: 0, ..EngineOptions::new("oscar-15m") }).await;
    let full = server.generate(request(tokens(5), 2)).await.err().unwrap();
    assert_eq!(full.code(), Code::ResourceExhausted, "{full}");
    type Change = fn(&mut pb::GenerateRequest);
    let cases: [(&str, Change); 7] = [
        ("sampling.top_p", |r| {
            r.sampling = Some(pb::RandomSampling { top_p: Some(3.0), ..Default::default() })
        }),
        ("sampling.num_sequences", |r| {
            r.sampling = Some(pb::RandomSampling { num_sequences: u32::MAX, ..Default::default() });
        }),
        ("token_ids", |r| {
            r.prompt = Some(pb::generate_request::Prompt::TokenIds(pb::TokenIds { ids: vec![1 << 30] }))
        }),
        ("stopping.max_new_tokens", |r| r.stopping.as_mut().unwrap().max_new_tokens = 5000),
        ("stopping.min_new_tokens", |r| r.stopping.as_mut().unwrap().min_new_tokens = 3),
        ("decoding.regex", |r| {
            let form = pb::decoding_parameters::StructuredOutput::Regex("(".into());
            r.decoding = Some(pb::DecodingParameters { structured_output: Some(form), ..Default::default() });
            r.stopping.as_mut().unwrap().ignore_eos = false;
        }),
        ("kv.kv_transfer_params.do_remote_decode", |r| {
            let asks = prost_types::Value { kind: Some(prost_types::value::Kind::BoolValue(true)) };
            let params = Some(prost_types::Struct { fields: [("do_remote_decode".into(), asks)].into() });
            r.kv = Some(pb::KvCacheParameters { kv_transfer_params: params, ..Default::default() });
        }),
    ];
    for (name, change) in cases {
        let mut wrong = request(tokens(5), 2);
        change(&mut wrong);
        let status = server.generate(wrong).await.err().unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{name}: {status}");
        assert!(status.message().starts_with(name), "{name}: {status}");
    }
    let other = pb::GenerateRequest { model: "other".into(), ..request(tokens(5), 2) };
    assert_eq!(server.generate(other).await.err().unwrap().code(), Code::NotFound);
}

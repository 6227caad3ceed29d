//! Settings of the published cache events: our flags, or vLLM's JSON.

use anyhow::{Context, Result, bail, ensure};
use oscar_events::{Encoding, Endpoint, EventPublisher, EventsConfig};
use oscar_server::KvEvents;
use serde::{Deserialize, Serialize};

/// Where the changes of the prefix cache are published.
#[derive(clap::Args, Serialize)]
pub struct EventArgs {
    /// Publish changes of the prefix cache over ZeroMQ, for routers, e.g. `tcp://*:5557`. Whoever can
    /// connect reads the tokens of prompts; prefixes with a salt, as those of --isolate-keys, are never
    /// published
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events: Option<String>,
    /// Send changes that a reader missed again, e.g. on `tcp://*:5558`
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_replay: Option<String>,
    /// Topic of the published messages, e.g. `kv@IP:PORT@MODEL` for llm-d; empty if absent
    #[arg(long, value_name = "TOPIC")]
    pub kv_events_topic: Option<String>,
    /// Form of the events: `map`, or `array` for readers from before vLLM 0.24
    #[arg(long, value_name = "FORM", value_parser = ["map", "array"], default_value = "map")]
    pub kv_events_encoding: String,
    /// The same settings as vLLM's JSON instead of the flags above, e.g.
    /// `{"publisher":"zmq","endpoint":"tcp://*:5557"}`
    #[arg(long, value_name = "JSON")]
    pub kv_events_config: Option<String>,
}

/// vLLM's `KVEventsConfig`, with our `encoding`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VllmConfig {
    enable_kv_cache_events: Option<bool>,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    topic: Option<String>,
    encoding: Option<String>,
    buffer_steps: Option<usize>,
    hwm: Option<usize>,
    max_queue_size: Option<usize>,
}

impl EventArgs {
    /// What is to be published, if anything. A sidecar on this machine reads the events without
    /// being asked for.
    pub fn resolve(&self, sidecar: bool) -> Result<Option<EventsConfig>> {
        let Some(json) = &self.kv_events_config else {
            return match &self.kv_events {
                Some(endpoint) => self.of_flags(endpoint).map(Some),
                None if sidecar => self.of_flags("tcp://127.0.0.1:0").map(Some),
                None => {
                    let alone = self.kv_events_replay.is_some() || self.kv_events_topic.is_some();
                    ensure!(!alone, "--kv-events-replay and --kv-events-topic need --kv-events ENDPOINT");
                    Ok(None)
                }
            };
        };
        ensure!(self.kv_events.is_none(), "--kv-events and --kv-events-config say the same: give one");
        Self::of_json(json).context("--kv-events-config")
    }

    fn of_flags(&self, endpoint: &str) -> Result<EventsConfig> {
        let endpoint = endpoint.parse().context("--kv-events")?;
        let replay = self.kv_events_replay.as_deref().map(str::parse).transpose();
        Ok(EventsConfig {
            replay: replay.context("--kv-events-replay")?,
            topic: self.kv_events_topic.clone().unwrap_or_default(),
            encoding: encoding(&self.kv_events_encoding)?,
            ..EventsConfig::new(endpoint)
        })
    }

    fn of_json(json: &str) -> Result<Option<EventsConfig>> {
        let config: VllmConfig = serde_json::from_str(json)?;
        match config.publisher.as_deref() {
            None | Some("zmq") if config.enable_kv_cache_events != Some(false) => {}
            None | Some("zmq" | "null") => return Ok(None),
            Some(other) => bail!("publisher `{other}` is not known: use zmq or null"),
        }
        for (name, value) in [("hwm", config.hwm), ("max_queue_size", config.max_queue_size)] {
            let fixed = EventsConfig::HIGH_WATER_MARK;
            ensure!(value.is_none_or(|value| value == fixed), "{name} is always {fixed}");
        }
        let endpoint: Endpoint = config.endpoint.as_deref().unwrap_or("tcp://*:5557").parse()?;
        Ok(Some(EventsConfig {
            replay: config.replay_endpoint.as_deref().map(str::parse).transpose()?,
            topic: config.topic.unwrap_or_default(),
            encoding: encoding(config.encoding.as_deref().unwrap_or("map"))?,
            buffer_steps: config.buffer_steps.unwrap_or(EventsConfig::BUFFER_STEPS),
            ..EventsConfig::new(endpoint)
        }))
    }
}

fn encoding(name: &str) -> Result<Encoding> {
    match name {
        "map" => Ok(Encoding::Map),
        "array" => Ok(Encoding::Array),
        other => bail!("encoding `{other}` is not known: use map or array"),
    }
}

/// What `/server_info` tells about a publisher.
pub fn announcement(publisher: &EventPublisher, page_tokens: usize) -> KvEvents {
    let EventsConfig { endpoint, replay, topic, .. } = &publisher.config;
    KvEvents {
        publisher: "zmq",
        endpoint_host: endpoint.host(),
        endpoint_port_base: endpoint.port(),
        replay_endpoint_port_base: replay.map(|replay| replay.port()),
        topic: topic.clone(),
        block_size: page_tokens,
        dp_size: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(json: Option<&str>) -> EventArgs {
        EventArgs {
            kv_events: None,
            kv_events_replay: None,
            kv_events_topic: None,
            kv_events_encoding: "map".into(),
            kv_events_config: json.map(str::to_owned),
        }
    }

    #[test]
    fn flags_and_json_say_the_same() {
        assert_eq!(args(None).resolve(false).unwrap(), None);
        let flags = EventArgs {
            kv_events: Some("tcp://*:5557".into()),
            kv_events_replay: Some("tcp://*:5558".into()),
            kv_events_topic: Some("kv".into()),
            kv_events_encoding: "array".into(),
            ..args(None)
        };
        let json = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558", "topic": "kv", "encoding": "array", "hwm": 100000}"#;
        assert_eq!(flags.resolve(false).unwrap(), args(Some(json)).resolve(false).unwrap());
        assert!(flags.resolve(false).unwrap().is_some());
        let default = args(Some("{}")).resolve(false).unwrap().unwrap();
        assert_eq!((default.endpoint.to_string().as_str(), default.buffer_steps), ("tcp://*:5557", 10_000));
        for off in [r#"{"publisher": "null"}"#, r#"{"enable_kv_cache_events": false}"#] {
            assert_eq!(args(Some(off)).resolve(false).unwrap(), None);
        }
    }

    #[test]
    fn what_cannot_be_followed_is_refused_by_name() {
        for (json, why) in [
            (r#"{"publisher": "nats"}"#, "nats"),
            (r#"{"endpoint": "tcp://router:5557"}"#, "router"),
            (r#"{"hwm": 5}"#, "hwm"),
            (r#"{"colour": 5}"#, "colour"),
            (r#"{"encoding": "xml"}"#, "xml"),
            ("nonsense", "--kv-events-config"),
        ] {
            let error = format!("{:#}", args(Some(json)).resolve(false).unwrap_err());
            assert!(error.contains(why) && error.contains("--kv-events-config"), "{error}");
        }
        let beside = args(None).resolve(true).unwrap().unwrap();
        assert!(beside.endpoint.is_loopback(), "a sidecar is on this machine");
        let alone = EventArgs { kv_events_replay: Some("tcp://*:1".into()), ..args(None) };
        assert!(alone.resolve(false).unwrap_err().to_string().contains("need --kv-events"));
        let both = EventArgs { kv_events: Some("tcp://*:1".into()), ..args(Some("{}")) };
        assert!(both.resolve(false).unwrap_err().to_string().contains("give one"));
    }
}

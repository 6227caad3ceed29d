//! `kv_transfer_params`: one machine computes a prompt, another continues it. The names are vLLM's.

use oscar_engine::{PageTransfer, Ticket};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::schema::shown;

const DECODE: &str = "kv_transfer_params.do_remote_decode";
const PREFILL: &str = "kv_transfer_params.do_remote_prefill";

/// What a request asks for.
///
/// # Errors
/// If this server may not or cannot do it. No address is looked up or connected to here.
pub fn wanted(
    app: &App,
    params: Option<&Map<String, Value>>,
    prompts: usize,
    streams: bool,
) -> Result<PageTransfer, ApiError> {
    let Some(params) = params else { return Ok(PageTransfer::None) };
    let flag = |name: &str| match params.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => {
            let problem = format!("must be true or false, not {}", shown(other));
            Err(ApiError::param(format!("kv_transfer_params.{name}"), problem))
        }
    };
    let (keep, fetch) = (flag("do_remote_decode")?, flag("do_remote_prefill")?);
    let refuse = |name: &str, problem: &str| Err(ApiError::param(name, problem));
    match (keep, fetch) {
        (false, false) => Ok(PageTransfer::None),
        (true, true) => refuse(DECODE, "cannot be true beside do_remote_prefill"),
        _ if prompts > 1 => refuse("kv_transfer_params", "is for one prompt; send each on its own"),
        (true, false) if app.config.transfer.desk.is_none() => {
            refuse(DECODE, "this server keeps no pages for others; start it with --kv-transfer-listen")
        }
        (true, false) if streams => refuse(DECODE, "the ticket comes with a whole answer; leave out stream"),
        (true, false) => Ok(PageTransfer::Keep),
        (false, true) => ticket(app, params).map(PageTransfer::Fetch),
    }
}

fn ticket(app: &App, params: &Map<String, Value>) -> Result<oscar_engine::PeerTicket, ApiError> {
    let peers = &app.config.transfer.peers;
    if peers.0.is_empty() {
        let problem = "this server fetches no pages from others; start it with --kv-transfer-peer";
        return Err(ApiError::param(PREFILL, problem));
    }
    let wrong = |name: &str, problem: String| ApiError::param(format!("kv_transfer_params.{name}"), problem);
    let text = |name: &str| match params.get(name) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(other) => Err(wrong(name, format!("must be a string, not {}", shown(other)))),
        None => Err(wrong(name, "is missing".to_owned())),
    };
    let host = text("remote_host")?;
    let port = port(params.get("remote_port"));
    let port = port.ok_or_else(|| wrong("remote_port", "must be a port number".to_owned()))?;
    let id = text("remote_request_id")?;
    let id = id
        .parse()
        .map_err(|_| wrong("remote_request_id", "is no ticket of this server's kind".to_owned()))?;
    peers.ticket(host, port, id).ok_or_else(|| {
        let host = shown(&Value::String(host.to_owned()));
        let problem = format!("{host} with port {port} is not among the --kv-transfer-peer of this server");
        wrong("remote_host", problem)
    })
}

/// A port. Numbers of a protobuf Struct are floats, so Dynamo writes it as text.
fn port(value: Option<&Value>) -> Option<u16> {
    let port = match value? {
        Value::String(text) => f64::from(text.parse::<u16>().ok()?),
        number => number.as_f64().filter(|port| port.fract() == 0.0)?,
    };
    (1.0..=65535.0).contains(&port).then_some(port as u16)
}

/// What the answer tells about a prompt whose pages were to be kept. Without a ticket the other machine
/// is told to compute the prompt itself.
pub fn answer(app: &App, ticket: Option<Ticket>) -> Value {
    let (Some(ticket), Some(desk)) = (ticket, &app.config.transfer.desk) else {
        return json!({"do_remote_prefill": false, "do_remote_decode": false});
    };
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": format!("{}:{}", desk.host, desk.port),
        "remote_request_id": ticket.id.to_string(),
        "remote_host": desk.host,
        "remote_port": desk.port,
        "remote_num_tokens": ticket.tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_or_text() {
        for value in [json!(14579), json!(14579.0), json!("14579")] {
            assert_eq!(port(Some(&value)), Some(14579), "{value}");
        }
        for value in [json!(0), json!(65536), json!(1.5), json!(-1), json!("http"), json!("NaN"), json!(null)]
        {
            assert_eq!(port(Some(&value)), None, "{value}");
        }
        assert_eq!(port(None), None);
    }
}

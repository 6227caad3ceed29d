//! One measured row, with the field names that scripts rely on.

use oscar_kernels_cpu::bench::Timing;
use serde_json::{Value, json};
use std::time::Duration;

pub struct Row {
    pub kv: String,
    /// Name of the device, as `--device` takes it.
    pub device: &'static str,
    pub context: usize,
    pub batch: usize,
    pub timing: Timing,
    /// What a repetition counts for: the median, or the mean where some of them have more to do
    /// than others.
    pub typical: Duration,
    /// Tokens that a repetition brings.
    pub tokens: usize,
    /// Bytes that the device must read for one repetition.
    pub bytes: usize,
    /// Time in µs in which the processor beside the device could read what it must; 0 without one.
    pub host_floor_us: f64,
    pub cache_bytes: usize,
    /// Further fields of the JSON object.
    pub extra: Value,
}

impl Row {
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.typical.as_secs_f64()
    }

    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.typical.as_secs_f64() / 1e9
    }

    /// Time in µs that reading the bytes once takes at the ceiling, which is in GB/s. The device and the
    /// processor beside it take turns.
    pub fn floor_us(&self, ceiling: f64) -> f64 {
        self.bytes as f64 / ceiling / 1e3 + self.host_floor_us
    }

    /// Share of a repetition that reading takes at the ceiling.
    pub fn of_floor(&self, ceiling: f64) -> f64 {
        self.floor_us(ceiling) / self.typical.as_secs_f64() / 1e6
    }

    pub fn json(&self, ceiling: f64) -> Value {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let mut object = json!({
            "kv": self.kv, "device": self.device, "context": self.context, "batch": self.batch,
            "us": us(self.timing.median), "us_mean": us(self.timing.mean), "us_min": us(self.timing.min),
            "us_max": us(self.timing.max), "tokens_per_s": self.tokens_per_s(), "gbps": self.gbps(),
            "ceiling_gbps": ceiling, "floor_us": self.floor_us(ceiling), "cache_bytes": self.cache_bytes,
        });
        if let (Some(object), Some(extra)) = (object.as_object_mut(), self.extra.as_object()) {
            object.extend(extra.clone());
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_names_its_device_and_adds_its_own_fields() {
        let timing = Timing::from_samples(&mut [Duration::from_millis(2)]).unwrap();
        let row = Row {
            kv: "oscar".into(),
            device: "cuda",
            context: 10,
            batch: 2,
            timing,
            typical: timing.median,
            tokens: 4,
            bytes: 4_000_000,
            host_floor_us: 500.0,
            cache_bytes: 7,
            extra: json!({"bench": "decode"}),
        };
        let object = row.json(4.0);
        assert_eq!((&object["device"], &object["bench"]), (&json!("cuda"), &json!("decode")));
        assert_eq!((row.tokens_per_s(), row.gbps(), row.floor_us(4.0)), (2000.0, 2.0, 1500.0));
        assert_eq!(row.of_floor(4.0), 0.75);
        assert_eq!(object["us"], 2000.0);
    }
}

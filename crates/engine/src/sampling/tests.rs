use super::*;
use proptest::prelude::*;

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params).unwrap()
}

#[test]
fn zero_temperature_is_greedy_with_stable_ties() {
    let mut s = sampler(SamplingParams::default());
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, f32::NAN]), 1);
    assert_eq!(s.sample(&[f32::NAN; 4]), 0);
}

#[test]
fn frequencies_follow_the_softmax() {
    let mut s = sampler(SamplingParams { temperature: 1.0, seed: 5, ..Default::default() });
    let logits = [2f32.ln(), 1f32.ln(), 1f32.ln()];
    let mut counts = [0; 3];
    for _ in 0..8000 {
        counts[s.sample(&logits) as usize] += 1;
    }
    assert!((counts[0] as f64 / 8000.0 - 0.5).abs() < 0.03, "{counts:?}");
    assert!((counts[1] as f64 / 8000.0 - 0.25).abs() < 0.03, "{counts:?}");
}

#[test]
fn filters_keep_what_they_say() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.15f32.ln(), 0.05f32.ln()];
    let seen = |params: SamplingParams| {
        let mut s = sampler(SamplingParams { temperature: 1.0, ..params });
        let mut seen = [false; 4];
        (0..600).for_each(|_| seen[s.sample(&logits) as usize] = true);
        seen
    };
    assert_eq!(seen(SamplingParams { top_k: 2, ..Default::default() }), [true, true, false, false]);
    assert_eq!(seen(SamplingParams { top_p: 0.9, ..Default::default() }), [true, true, true, false]);
    assert_eq!(seen(SamplingParams { min_p: 0.5, ..Default::default() }), [true, true, false, false]);
    assert_eq!(seen(SamplingParams { top_p: 0.01, ..Default::default() }), [true, false, false, false]);
}

#[test]
fn wrong_settings_are_named() {
    for (params, name) in [
        (SamplingParams { temperature: -1.0, ..Default::default() }, "temperature"),
        (SamplingParams { temperature: f32::NAN, ..Default::default() }, "temperature"),
        (SamplingParams { top_p: 0.0, ..Default::default() }, "top_p"),
        (SamplingParams { min_p: 1.5, ..Default::default() }, "min_p"),
        (SamplingParams { repetition_penalty: 0.0, ..Default::default() }, "repetition_penalty"),
        (SamplingParams { presence_penalty: f32::NAN, ..Default::default() }, "presence_penalty"),
        (SamplingParams { frequency_penalty: 2.5, ..Default::default() }, "frequency_penalty"),
        (SamplingParams { logit_bias: vec![(3, 101.0)], ..Default::default() }, "logit_bias"),
    ] {
        assert!(Sampler::new(params).unwrap_err().to_string().starts_with(name));
    }
}

#[test]
fn penalties_count_the_answer_and_repetition_the_prompt_too() {
    let logits = [2.0, 1.9, 1.5, -1.0];
    let mut frequency = sampler(SamplingParams { frequency_penalty: 0.3, ..Default::default() });
    assert_eq!(
        (0..5).map(|_| frequency.sample(&logits)).collect::<Vec<_>>(),
        [0, 1, 0, 1, 2],
        "2.0, then 1.9 over 1.7, 1.7 over 1.6, 1.6 over 1.4, then 1.5 over 1.4 and 1.3"
    );
    let mut presence = sampler(SamplingParams { presence_penalty: 0.3, ..Default::default() });
    assert_eq!((0..4).map(|_| presence.sample(&logits)).collect::<Vec<_>>(), [0, 1, 0, 0]);
    let params = SamplingParams { repetition_penalty: 1.5, ..Default::default() };
    let mut repetition = sampler(params).for_prompt(&[0, 0, 77]);
    assert_eq!([repetition.sample(&logits), repetition.sample(&logits)], [1, 2]);
    let params = SamplingParams { repetition_penalty: 2.0, ..Default::default() };
    let mut negative = sampler(params).for_prompt(&[0]);
    assert_eq!(negative.sample(&[-1.0, -1.5]), 1, "a negative logit is multiplied");
}

#[test]
fn only_plain_settings_make_do_with_a_list() {
    let pick = |params: SamplingParams| sampler(params).pick();
    assert_eq!(pick(SamplingParams::default()), Some(Pick::Greedy));
    let top = |top_k| SamplingParams { temperature: 0.7, top_k, ..Default::default() };
    assert_eq!(pick(top(20)), Some(Pick::Top(20)));
    assert_eq!(pick(top(MOST_CANDIDATES)), Some(Pick::Top(256)));
    for whole in [
        top(0),
        top(MOST_CANDIDATES + 1),
        SamplingParams { repetition_penalty: 1.1, ..Default::default() },
        SamplingParams { logit_bias: vec![(3, 1.0)], ..top(20) },
        SamplingParams { presence_penalty: 0.5, ..Default::default() },
    ] {
        assert_eq!(pick(whole.clone()), None, "{whole:?}");
    }
}

#[test]
fn bias_and_bans_decide() {
    let params = SamplingParams { logit_bias: vec![(2, 3.0), (9, 1.0)], ..Default::default() };
    let mut biased = sampler(params);
    assert_eq!(biased.sample(&[1.0, 0.0, 0.5]), 2);
    assert_eq!(biased.sample_except(&[1.0, 0.0, 0.5], &[2]), 0);
}

#[test]
fn only_allowed_tokens_are_chosen() {
    let allowed = [0b0110, 1 << 3];
    let mut logits = vec![5.0; 70];
    logits[2] = 6.0;
    logits[35] = 5.5;
    let mut greedy = sampler(SamplingParams::default());
    assert_eq!(greedy.sample_within(&logits, &allowed, &[]), 2);
    assert_eq!(greedy.sample_within(&logits, &allowed, &[2]), 35);
    assert_eq!(greedy.sample_within(&logits, &allowed, &[1, 2, 35]), 2, "a ban of everything is lifted");
    let params = SamplingParams { temperature: 2.0, top_k: 40, frequency_penalty: 0.1, ..Default::default() };
    let mut drawn = sampler(params);
    let tokens: BTreeSet<u32> = (0..200).map(|_| drawn.sample_within(&logits, &allowed, &[])).collect();
    assert_eq!(tokens, BTreeSet::from([1, 2, 35]));
}

/// Logits as they come and as they should not.
fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let values = prop_oneof![
        6 => -5.0f32..5.0,
        3 => prop::sample::select(vec![-1.0f32, -0.0, 0.0, 2.5]),
        1 => prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 1e30]),
    ];
    prop::collection::vec(values, 1..400)
}

proptest! {
    #[test]
    fn a_list_gives_the_token_that_the_whole_row_gives(
        rows in prop::collection::vec(any_logits(), 1..6), seed in any::<u64>(), top_k in 1usize..300,
        temperature in prop::sample::select(vec![0.0f32, 0.3, 1.0, 5.0]),
        top_p in prop::sample::select(vec![1.0f32, 0.9, 0.3]), min_p in prop::sample::select(vec![0.0f32, 0.1]),
    ) {
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..Default::default() };
        let (mut whole, mut listed) = (sampler(params.clone()), sampler(params));
        for row in rows {
            let token = match listed.pick() {
                Some(what) => listed.sample_among(&oscar_backend::pick(&row, what)),
                None => listed.sample(&row),
            };
            prop_assert_eq!(token, whole.sample(&row));
        }
    }

    #[test]
    fn the_nth_draw_depends_on_seed_and_n_alone(seed in any::<u64>(), logits in prop::collection::vec(-5.0f32..5.0, 2..40)) {
        let params = SamplingParams { temperature: 0.8, seed, ..Default::default() };
        let (mut a, mut b) = (sampler(params.clone()), sampler(params));
        b.sample(&[0.0, 1.0]);
        let first = a.sample(&logits);
        prop_assert!((first as usize) < logits.len());
        prop_assert_eq!(a.sample(&logits), b.sample(&logits));
    }
}

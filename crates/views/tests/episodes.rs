//! Episodes on the embedded model: topics, routes and what each view keeps.

mod support;

use oscar_models::{ModelSource, Weights};
use oscar_views::{
    Budget, EpisodeOptions, Episodes, HeadSplit, History, InputEmbeddings, Keep, Probe, Probing, Route,
    Topics, ViewSet, select,
};
use std::ops::Range;
use std::sync::Arc;
use support::{base, runner};

/// Three topics with words of their own, in turn: 24 utterances of 32 tokens.
fn conversation() -> (Vec<u32>, Vec<Range<usize>>) {
    let word = |topic: u32, i: u32| 400 + topic * 500 + i.wrapping_mul(2654435761) % 23;
    let tokens = (0..24).flat_map(|u| (0..32).map(move |i| word(u / 2 % 3, u * 32 + i))).collect();
    (tokens, (0..24).map(|u| u * 32..(u + 1) * 32).collect())
}

fn embeddings() -> InputEmbeddings {
    let weights = Weights::open(&ModelSource::Embedded(oscar_embedded::FILES)).unwrap();
    InputEmbeddings::new(Arc::new(weights)).unwrap()
}

fn options() -> EpisodeOptions {
    EpisodeOptions { count: 3, segment: 2, ..EpisodeOptions::default() }
}

#[test]
fn topics_are_found_and_questions_routed() {
    let embeddings = embeddings();
    let (tokens, utterances) = conversation();
    let topics = Topics::new(&tokens, &utterances, &embeddings, options());
    assert_eq!(topics.episodes(), 3);
    let of: Vec<usize> = (0..3).map(|topic| topics.episode_at(topic * 64).unwrap()).collect();
    for (u, utterance) in utterances.iter().enumerate() {
        assert_eq!(topics.episode_at(utterance.start), Some(of[u / 2 % 3]), "utterance {u}");
    }
    assert_eq!(topics.episode_at(24 * 32), None);
    for (topic, &episode) in of.iter().enumerate() {
        let question = &tokens[topic * 64 + 5..topic * 64 + 15];
        let (route, similarity) = topics.route(question, &embeddings);
        assert_eq!(route, Route::Episode(episode));
        assert!(similarity > 0.5, "{similarity}");
    }
    // As much of one topic as of another; and nothing at all.
    let both = [&tokens[..16], &tokens[64..80]].concat();
    let near = Topics::new(&tokens, &utterances, &embeddings, EpisodeOptions { margin: 0.5, ..options() });
    let (route, _) = near.route(&both, &embeddings);
    assert!(
        matches!(route, Route::Union(a, b) if a != b && route.covers(of[0]) && route.covers(of[1])),
        "{route:?}"
    );
    assert_eq!(topics.route(&[], &embeddings).0, Route::Global);
    let strict =
        Topics::new(&tokens, &utterances, &embeddings, EpisodeOptions { threshold: 1.1, ..options() });
    assert_eq!(strict.route(&tokens[..16], &embeddings).0, Route::Global);
    // A probe recites its own episode, in the order of time, within its length.
    for &episode in &of {
        let recited = topics.recited(episode, 200);
        assert!(recited.is_sorted_by_key(|segment| segment.start));
        assert_eq!(recited.len(), 3, "three segments of 64 tokens fit");
        assert!(recited.iter().all(|segment| topics.episode_at(segment.start) == Some(episode)));
        assert_eq!(topics.recited(episode, 1).len(), 1, "the closest is always recited");
    }
}

/// Equal for any chunks; a union is the maximum of its episodes; nothing is left behind.
#[test]
fn episodes_keep_the_rows_of_their_topic() {
    let embeddings = embeddings();
    let (tokens, utterances) = conversation();
    let scored = |chunk: usize| {
        let mut runner = runner(chunk);
        let sequence = base(&mut runner, &tokens);
        let before = runner.usage();
        let history = History { sequence: &sequence, tokens: &tokens, len: tokens.len(), observed: None };
        let topics = Topics::new(&tokens, &utterances, &embeddings, options());
        let probe = Probe { recall: tokens[..7].to_vec(), ..Probe::default() };
        let episodes = Episodes::score(&mut runner, &history, topics, &probe).unwrap();
        assert_eq!(runner.usage(), before, "probes leave pages behind");
        let layout = runner.layout().clone();
        (episodes, layout)
    };
    let (episodes, layout) = scored(512);
    let (again, _) = scored(96);
    assert_eq!(episodes.routes().count(), 4);
    let kept = |episodes: &Episodes, route| {
        select(&layout, &episodes.scores(route), Budget::Rows(60), HeadSplit::Global, &[]).kept
    };
    for route in episodes.routes() {
        assert!(kept(&episodes, route) == kept(&again, route), "{route:?}");
    }
    let all: Vec<_> = (0..3).map(|e| episodes.scores(Route::Episode(e))).collect();
    let (union, global) = (episodes.scores(Route::Union(0, 2)), episodes.scores(Route::Global));
    for head in 0..union.rows.len() {
        for row in 0..union.rows[head].len() {
            let [a, b, c] = [0, 1, 2].map(|e: usize| all[e].rows[head][row]);
            assert_eq!((union.rows[head][row], global.rows[head][row]), (a.max(c), a.max(b).max(c)));
        }
    }
    // An episode keeps more rows of its own topic than any other episode does. The keys know no topic.
    let share = |view: usize, topic: usize| {
        let rows: Vec<u32> = kept(&episodes, Route::Episode(view)).concat();
        let of_topic = |p: &&u32| episodes.topics.episode_at(**p as usize) == Some(topic);
        rows.iter().filter(of_topic).count() as f64 / rows.len() as f64
    };
    for topic in 0..3 {
        let shares = [0, 1, 2].map(|view| share(view, topic));
        let others = (0..3).filter(|&view| view != topic);
        assert!(others.map(|view| shares[view]).all(|other| other < shares[topic]), "{topic}: {shares:?}");
    }
    // A history that lost rows cannot be probed.
    let mut runner = runner(512);
    let sequence = base(&mut runner, &tokens);
    let view = runner.derive(&sequence, tokens.len(), vec![vec![64, 65]; 12]).unwrap();
    let history = History { sequence: &view, tokens: &tokens, len: tokens.len(), observed: None };
    let topics = Topics::new(&tokens, &utterances, &embeddings, options());
    let error = Episodes::score(&mut runner, &history, topics, &Probe::default()).unwrap_err();
    assert!(error.to_string().contains("whole history"), "{error}");
}

/// A server probes in small pieces, gives pages back on the way, and keeps only the scores of kept rows:
/// every view is the one that a probe in one piece gives.
#[test]
fn a_view_set_keeps_the_rows_of_a_probe_in_one_piece() {
    let embeddings = embeddings();
    let (tokens, utterances) = conversation();
    let mut runner = runner(512);
    let sequence = base(&mut runner, &tokens);
    let history = History { sequence: &sequence, tokens: &tokens, len: tokens.len(), observed: None };
    let topics = Topics::new(&tokens, &utterances, &embeddings, options());
    let probe = Probe { recall: tokens[..7].to_vec(), repeat: tokens[9..20].to_vec() };
    let episodes = Episodes::score(&mut runner, &history, topics.clone(), &probe).unwrap();
    let before = runner.usage();
    let mut probing = Probing::reciting(&runner, &history, &topics, &probe).unwrap();
    let mut pieces = 0;
    while !probing.is_done() {
        assert!(probing.advance(&mut runner, &history, 50).unwrap() <= 50);
        pieces += 1;
        if pieces == 5 {
            probing.release();
            assert_eq!(runner.usage(), before);
        }
    }
    assert!(pieces > 12, "{pieces}");
    let keep =
        |heads| Keep { budget: Budget::Rows(60), heads, protected: std::iter::once(100..110).collect() };
    let scores = probing.scores();
    let layout = runner.layout().clone();
    for (heads, unions) in
        [(HeadSplit::Global, true), (HeadSplit::Uniform, true), (HeadSplit::Adaptive, false)]
    {
        let set = ViewSet::new(layout.clone(), scores.clone(), Some(topics.clone()), keep(heads));
        assert_eq!(set.probe_tokens, episodes.probe_tokens());
        assert_eq!((set.routes().count(), set.rows()), (4, &[70; 4][..]));
        for route in set.routes().chain([Route::Union(2, 0)]) {
            let Keep { budget, heads, protected } = keep(heads);
            let expected = select(&layout, &episodes.scores(route), budget, heads, &protected);
            let got = set.selection(route);
            assert_eq!((got.chosen, got.protected), (expected.chosen, expected.protected), "{route:?}");
            if unions || matches!(route, Route::Episode(_)) {
                assert!(got.kept == expected.kept, "{heads:?} {route:?}");
            }
        }
        let question = &tokens[5..15];
        let (route, similarity) = set.route(question, &embeddings);
        assert_eq!((route, similarity), {
            let (route, similarity) = topics.route(question, &embeddings);
            (route, Some(similarity))
        });
    }
    // Without topics there is one view.
    let zip = Probing::repeating(&runner, &history, &probe).unwrap().run(&mut runner, &history).unwrap();
    let set = ViewSet::new(layout, zip, None, keep(HeadSplit::Global));
    assert_eq!((set.routes().collect::<Vec<_>>(), set.rows()), (vec![Route::Global], &[70][..]));
    assert_eq!(set.route(&tokens[..5], &embeddings), (Route::Global, None));
}

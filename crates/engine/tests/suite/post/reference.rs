//! Answers on views without an engine.

use super::{ANSWER, Asked, BLOCK, FIRST, KVZIP, ROWS, setting, setup};
use oscar_engine::{Evict, Eviction, PostSetting, Route};
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};
use oscar_views::{History, Keep, Probing, Topics, ViewSet, score};
use std::ops::Range;

/// The same answers without an engine: base, probe, view and turn one after the other.
pub struct Reference {
    runner: Runner<CpuBackend>,
    setting: PostSetting,
    /// Tokens of an answer.
    pub count: usize,
}

impl Reference {
    pub fn new() -> Self {
        Self { runner: setup(1 << 30, 512).embedded(), setting: setting(), count: ANSWER }
    }

    fn base(&mut self, tokens: &[u32]) -> Sequence {
        let mut base = Sequence::forkable(&self.runner);
        self.runner.prefill(&mut base, tokens, &mut StepOutput::default(), |_| {}).unwrap();
        base
    }

    /// The answer on the view of the last point up to `until`, and its route.
    pub fn answer(
        &mut self,
        asked: &Asked,
        eviction: Eviction,
        protected: &[Range<usize>],
        until: usize,
    ) -> (Vec<u32>, Route) {
        self.answers(std::slice::from_ref(asked), eviction, protected, until).remove(0)
    }

    /// The same for questions behind one history.
    pub fn answers(
        &mut self,
        questions: &[Asked],
        eviction: Eviction,
        protected: &[Range<usize>],
        until: usize,
    ) -> Vec<(Vec<u32>, Route)> {
        let Asked { prompt, turn } = &questions[0];
        let start = turn.start / 64 * 64;
        let point = FIRST + (until - FIRST) / BLOCK * BLOCK;
        let tokens = &prompt[..point];
        let at_point = self.base(tokens);
        let history = History { sequence: &at_point, tokens, len: point, observed: None };
        let (runner, setting) = (&mut self.runner, &self.setting);
        let clip = |r: &Range<usize>| r.start..r.end.min(point);
        let utterances: Vec<_> = turn.utterances.iter().map(clip).filter(|r| !r.is_empty()).collect();
        let topics = (eviction == Eviction::Episodes)
            .then(|| Topics::new(tokens, &utterances, &setting.embeddings, setting.episodes));
        let scores = match &topics {
            Some(topics) => {
                let probing = Probing::reciting(runner, &history, topics, &setting.probe).unwrap();
                probing.run(runner, &history).unwrap()
            }
            None => {
                let evict = if eviction == KVZIP { Evict::KvZip } else { Evict::KeyDiff };
                vec![score(runner, &history, evict, &setting.probe).unwrap()]
            }
        };
        let budget = ROWS.to_string().parse().unwrap();
        let keep = Keep { budget, heads: eviction.default_split(), protected: protected.into() };
        let set = ViewSet::new(runner.layout().clone(), scores, topics, keep);
        let base = self.base(&prompt[..start]);
        let answer = |asked: &Asked| {
            assert_eq!(asked.prompt[..start], prompt[..start]);
            let (route, _) = set.route(&asked.turn.question, &self.setting.embeddings);
            let view = self.runner.gather(&at_point, point, set.selection(route).kept).unwrap();
            let mut turn = self.runner.fork_reading(&base, start, view).unwrap();
            (self.greedy(&mut turn, &asked.prompt[start..]), route)
        };
        questions.iter().map(answer).collect()
    }

    pub fn whole(&mut self, prompt: &[u32]) -> Vec<u32> {
        let mut sequence = Sequence::new();
        self.greedy(&mut sequence, prompt)
    }

    fn greedy(&mut self, sequence: &mut Sequence, prompt: &[u32]) -> Vec<u32> {
        let (mut out, mut answer) = (StepOutput::default(), Vec::new());
        self.runner.prefill(sequence, prompt, &mut out, |_| {}).unwrap();
        loop {
            answer.push(oscar_backend::argmax(&out.logits));
            if answer.len() == self.count {
                return answer;
            }
            let request = StepRequest { sequence, tokens: &answer[answer.len() - 1..], logits: Logits::Last };
            self.runner.step(&mut [request], &mut out).unwrap();
        }
    }
}

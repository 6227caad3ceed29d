//! The tree with a store beside it, on the model of memory of [`radix_world`](crate::radix_world):
//! pages are offered, stored, lost, evicted, brought back after a restart, and every position that
//! a query reads must hold the row of exactly its tokens.

use crate::prefix::resume_point;
use crate::radix_world::{Live, World, layout, text, with_states};
use crate::{PageHash, PageKind, PrefixKey, RestorePlan, RestoredPage, StoredKinds};
use oscar_codec::{KvFormat, PAGE_TOKENS, Windows};
use proptest::prelude::*;
use std::collections::BTreeMap;

type Rows = [u64; PAGE_TOKENS];

/// Copies of pages: rows, and the progress of quantized ones. A state is a digest, its first row.
#[derive(Default)]
struct Store(BTreeMap<(PageHash, PageKind), (Rows, usize)>);

impl Store {
    fn kinds(&self, tokens: &[u32]) -> Vec<StoredKinds> {
        let of = |hash| {
            let mut kinds = StoredKinds::default();
            let has = |kind: &PageKind| self.0.contains_key(&(hash, *kind));
            PageKind::ALL.into_iter().filter(has).for_each(|kind| kinds.insert(kind));
            kinds
        };
        PageHash::chain(PrefixKey::new(None, tokens)).map(of).take_while(|kinds| !kinds.is_empty()).collect()
    }

    /// Copies everything that the tree offers and that has no copy.
    fn take(&mut self, world: &World, tokens: &[u32], ends: bool) {
        for offer in world.tree.offers(tokens, 0, ends) {
            if let Some(page) = offer.full {
                page.stored().set(true);
                self.0.insert((offer.hash, PageKind::Full), (world.memory.full[&page.id().0], 0));
            }
            if let Some(page) = offer.coded {
                let kind = if page.is_complete() { PageKind::Coded } else { PageKind::Part };
                let rows = world.memory.coded[&page.id().0];
                self.0.insert((offer.hash, kind), (rows, page.coded()));
            }
            if let Some(page) = offer.sliding {
                let rows = world.memory.sliding[&page.id().0];
                self.0.insert((offer.hash, PageKind::Sliding), (rows, 0));
            }
            if let Some(state) = offer.state {
                state.stored().set(true);
                let rows = [world.memory.states[&state.id().0]; PAGE_TOKENS];
                self.0.insert((offer.hash, PageKind::State), (rows, 0));
            }
        }
    }

    /// Brings back what helps; returns the plan, and whether it was carried out without making room.
    fn fetch(&self, world: &mut World, tokens: &[u32], exact: bool) -> Option<(RestorePlan, bool)> {
        let plan = world.tree.plan_restore(tokens, &self.kinds(tokens), exact)?;
        let chain: Vec<PageHash> = PageHash::chain(PrefixKey::new(None, tokens)).collect();
        let mut is_whole = true;
        for wanted in &plan.wanted {
            let count = wanted.kind.counts();
            let taken = world.pool.take(count).or_else(|error| {
                is_whole = false;
                world.tree.reclaim(error.wanted - error.free);
                world.pool.take(count)
            });
            let Ok(mut taken) = taken else { return Some((plan, false)) };
            let (rows, progress) = self.0[&(chain[wanted.block], wanted.kind)];
            let page = match wanted.kind {
                PageKind::Full => {
                    let page = taken.full.pop().unwrap();
                    world.memory.full.insert(page.id().0, rows);
                    RestoredPage::Full(page)
                }
                PageKind::Sliding => {
                    let page = taken.sliding.pop().unwrap();
                    world.memory.sliding.insert(page.id().0, rows);
                    RestoredPage::Sliding(page)
                }
                PageKind::State => {
                    let slot = taken.states.pop().unwrap();
                    world.memory.states.insert(slot.id().0, rows[0]);
                    RestoredPage::State(slot)
                }
                PageKind::Coded | PageKind::Part => {
                    let page = taken.coded.pop().unwrap();
                    page.mark_coded(progress);
                    world.memory.coded.insert(page.id().0, rows);
                    RestoredPage::Coded(page)
                }
            };
            is_whole &= world.tree.restore(tokens, [(wanted.block, page)]) == 1;
            is_whole &= wanted.kind != PageKind::Part;
        }
        Some((plan, is_whole))
    }
}

/// Computes and stores a text; returns how much of it was cached. As the scheduler does, a sequence with
/// states pauses where it leaves what is stored, and at its last whole page.
fn compute(world: &mut World, tokens: Vec<u32>) -> usize {
    let pauses = [world.tree.stored_tokens(&tokens[..]), resume_point(tokens.len())];
    let found = world.begin(tokens);
    let last = world.live.len() - 1;
    let mut is_whole = true;
    let has_states = world.layout.has_states();
    for pause in pauses.into_iter().filter(|_| has_states) {
        let count = pause.saturating_sub(world.live[last].pages.len());
        is_whole = is_whole && (count == 0 || world.grow(last, count));
        let Live { tokens, pages, .. } = &mut world.live[last];
        world.tree.insert(&*tokens, pages);
        if pages.len() == resume_point(tokens.len()) {
            world.tree.mark_prompt(&*tokens);
        }
    }
    is_whole = is_whole && world.grow(last, usize::MAX);
    let Live { tokens, mut pages, .. } = world.live.pop().unwrap();
    if is_whole {
        world.tree.insert(&tokens, &mut pages);
        world.tree.mark_prompt(&tokens);
    }
    found
}

fn world(format: KvFormat, windows: Windows, blocks: usize, approximates: bool) -> World {
    World::new(format, windows, blocks, approximates)
}

#[derive(Clone, Debug)]
enum Action {
    Compute { text: u64, len: usize },
    Offer { text: u64, len: usize, ends: bool },
    Fetch { text: u64, len: usize, exact: bool },
    Lose { which: usize },
    Reclaim { blocks: usize },
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    let text = || (0u64..16, 2usize..700);
    prop_oneof![
        6 => text().prop_map(|(text, len)| Action::Compute { text, len }),
        6 => (text(), prop::bool::weighted(0.8))
            .prop_map(|((text, len), ends)| Action::Offer { text, len, ends }),
        8 => (text(), any::<bool>()).prop_map(|((text, len), exact)| Action::Fetch { text, len, exact }),
        1 => any::<usize>().prop_map(|which| Action::Lose { which }),
        2 => (0usize..6).prop_map(|blocks| Action::Reclaim { blocks }),
        2 => Just(Action::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn pages_that_come_back_are_right_and_accounted_for(
        actions in prop::collection::vec(action(), 1..60), sink in 0usize..6, recent in 1usize..150,
        blocks in 14usize..60, coded in prop::bool::weighted(0.8), approximates in any::<bool>(),
        window in prop::option::of(1usize..300), zero_width in any::<bool>(),
        states in any::<bool>(),
    ) {
        let format = if coded { KvFormat::OSCAR2 } else { KvFormat::Bf16 };
        let layout = layout(format, Windows::new(16 * sink, recent).unwrap(), zero_width, window);
        let layout = if states { with_states(layout) } else { layout };
        let (mut world, mut store) = (World::of(layout.clone(), blocks, approximates), Store::default());
        for action in actions {
            match action {
                Action::Compute { text: number, len } => {
                    compute(&mut world, text(number, len));
                }
                Action::Offer { text: number, len, ends } => store.take(&world, &text(number, len), ends),
                Action::Fetch { text: number, len, exact } => {
                    let tokens = text(number, len);
                    let before = world.tree.resumable_len(&tokens, exact);
                    if let Some((plan, is_whole)) = store.fetch(&mut world, &tokens, exact) {
                        prop_assert!(plan.len >= before && (!exact || plan.exact));
                        let found = world.tree.resumable_len(&tokens, plan.exact);
                        prop_assert!(!is_whole || found >= plan.len, "{found} of {plan:?}");
                        prop_assert!(plan.exact || approximates && !states);
                    }
                }
                Action::Lose { which } => {
                    let keys: Vec<_> = store.0.keys().copied().collect();
                    keys.get(which % keys.len().max(1)).map(|key| store.0.remove(key));
                }
                Action::Reclaim { blocks } => {
                    world.tree.reclaim(blocks * world.layout.unquantized_block_bytes());
                }
                Action::Restart => world = World::of(layout.clone(), blocks, approximates),
            }
            world.check_accounts();
        }
        prop_assert!(approximates || world.approximate_hits == 0);
        world.tree.flush();
        prop_assert_eq!((world.tree.tokens(), world.pool.usage().bytes), (0, 0));
    }
}

/// A conversation comes back exact after a restart; its middle, whose window nobody stored, only as
/// an approximate hit, and not at all where hits must be exact.
#[test]
fn ends_come_back_exact_and_middles_approximate() {
    let windows = Windows::new(64, 128).unwrap();
    let (mut before, mut store) = (world(KvFormat::OSCAR2, windows, 100, true), Store::default());
    let tokens = text(0, 1000);
    compute(&mut before, tokens.clone());
    store.take(&before, &tokens, true);
    let full = store.0.keys().filter(|(_, kind)| *kind == PageKind::Full).count();
    assert_eq!(full, 3, "the sink, and two pages of the recent window");

    for (approximates, middle, hits) in [(true, 448, 1), (false, 64, 0)] {
        let mut after = world(KvFormat::OSCAR2, windows, 100, approximates);
        let (plan, is_whole) = store.fetch(&mut after, &tokens[..999], !approximates).unwrap();
        assert_eq!((plan.len, plan.exact, is_whole), (960, true, true));
        assert_eq!(after.begin(tokens.clone()), 960);
        assert_eq!(after.approximate_hits, 0);
        store.fetch(&mut after, &tokens[..500], !approximates);
        assert_eq!((after.begin(tokens[..500].to_vec()), after.approximate_hits), (middle, hits));
        after.check_accounts();
    }
}

/// The window of the sliding layers is stored with an end, and without it nothing comes back.
#[test]
fn sliding_windows_come_back_with_their_ends() {
    let layout = layout(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), false, Some(300));
    let new = || World::of(layout.clone(), 100, false);
    let (mut before, mut store) = (new(), Store::default());
    let tokens = text(0, 1000);
    compute(&mut before, tokens.clone());
    store.take(&before, &tokens, true);
    let sliding = |store: &Store| store.0.keys().filter(|(_, kind)| *kind == PageKind::Sliding).count();
    assert_eq!(sliding(&store), 5, "positions 661 to 959");
    let mut after = new();
    let (plan, is_whole) = store.fetch(&mut after, &tokens[..999], true).unwrap();
    assert_eq!((plan.len, plan.exact, is_whole), (960, true, true));
    assert_eq!(after.begin(tokens.clone()), 960);
    after.check_accounts();

    let lost = store.0.keys().copied().find(|(_, kind)| *kind == PageKind::Sliding).unwrap();
    store.0.remove(&lost);
    assert_eq!(store.fetch(&mut new(), &tokens[..999], true), None);
}

/// States are stored at ends, once each, and nothing comes back beyond the last one that is there.
#[test]
fn states_come_back_with_their_ends() {
    let layout = with_states(layout(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), false, None));
    let new = || World::of(layout.clone(), 100, false);
    let (mut before, mut store) = (new(), Store::default());
    let tokens = text(0, 1024);
    // A prompt of 600 tokens, and the turn that continues it.
    compute(&mut before, tokens[..600].to_vec());
    store.take(&before, &tokens[..600], true);
    assert_eq!(compute(&mut before, tokens.clone()), 576);
    store.take(&before, &tokens, true);
    let chain: Vec<PageHash> = PageHash::chain(PrefixKey::new(None, &tokens)).collect();
    let ends = |store: &Store| {
        let has = |block: &usize| store.0.contains_key(&(chain[*block - 1], PageKind::State));
        (1..=chain.len()).filter(has).map(|block| 64 * block).collect::<Vec<_>>()
    };
    assert_eq!(ends(&store), [576, 960, 1024]);
    let mut after = new();
    let (plan, is_whole) = store.fetch(&mut after, &tokens[..1023], true).unwrap();
    assert_eq!((plan.len, plan.exact, is_whole), (960, true, true));
    let states = plan.wanted.iter().filter(|wanted| wanted.kind == PageKind::State).count();
    assert_eq!((states, after.begin(tokens.clone())), (1, 960));
    assert!(!after.tree.lacks_state(&tokens[..960], &store.kinds(&tokens[..960]), Some(&plan)));
    after.check_accounts();

    // The pages of the end are there, its state is not.
    store.0.remove(&(chain[14], PageKind::State));
    let mut after = new();
    assert_eq!(store.fetch(&mut after, &tokens[..1023], true).unwrap().0.len, 576);
    assert_eq!(after.begin(tokens.clone()), 576);
    assert!(new().tree.lacks_state(&tokens[..960], &store.kinds(&tokens[..960]), None));
    assert!(after.tree.lacks_state(&tokens[..960], &store.kinds(&tokens[..960]), None));
    store.0.retain(|(_, kind), _| *kind != PageKind::State);
    assert_eq!(store.fetch(&mut new(), &tokens[..1023], true), None);
}

/// A state that memory pressure took comes back alone: the pages are still in the tree.
#[test]
fn a_state_comes_back_to_the_pages_of_the_tree() {
    let layout = with_states(layout(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), false, None));
    let (mut world, mut store) = (World::of(layout, 100, false), Store::default());
    let tokens = text(0, 600);
    compute(&mut world, tokens.clone());
    store.take(&world, &tokens, true);
    let spare = world.tree.pages().spare_full * world.layout.full_block_bytes();
    world.tree.reclaim(spare + 1);
    assert_eq!((world.tree.pages().states, world.tree.resumable_len(&tokens[..], true)), (0, 0));
    let (plan, _) = store.fetch(&mut world, &tokens[..599], true).unwrap();
    assert_eq!(plan.len, 576);
    assert!(plan.wanted.iter().any(|wanted| wanted.kind == PageKind::State));
    assert!(plan.wanted.iter().all(|wanted| wanted.block == 8 || wanted.kind == PageKind::Full));
    assert_eq!(world.begin(tokens), 576);
    world.check_accounts();
}

/// The oldest prefix of a full cache comes back: room is not taken from the part that the tree still has.
#[test]
fn room_for_a_prefix_is_not_taken_from_its_beginning() {
    let (mut world, mut store) =
        (world(KvFormat::Bf16, Windows::new(64, 128).unwrap(), 12, false), Store::default());
    let tokens = text(0, 500);
    compute(&mut world, tokens.clone());
    store.take(&world, &tokens, true);
    compute(&mut world, text(0x5555, 256));
    world.tree.reclaim(3 * world.layout.full_block_bytes());
    compute(&mut world, text(0xaaaa, 256));
    assert_eq!((world.tree.resumable_len(&tokens[..], true), world.pool.free()), (256, 0));
    store.fetch(&mut world, &tokens[..499], true).unwrap();
    assert_eq!(world.begin(tokens), 448);
    world.check_accounts();
}

/// Two prompts that share a beginning: the window before the branch is stored with the second.
#[test]
fn a_branch_comes_back_exact() {
    let windows = Windows::new(64, 128).unwrap();
    let (mut before, mut store) = (world(KvFormat::OSCAR2, windows, 100, false), Store::default());
    let with = |end: u64| [text(0, 512), text(end, 300)].concat();
    for end in [0x5555, 0xaaaa] {
        compute(&mut before, with(end));
        store.take(&before, &with(end), true);
    }
    let mut after = world(KvFormat::OSCAR2, windows, 100, false);
    let other = with(0xffff);
    let (plan, _) = store.fetch(&mut after, &other, true).unwrap();
    assert_eq!((plan.len, plan.exact), (512, true));
    assert_eq!(after.begin(other), 512);
}

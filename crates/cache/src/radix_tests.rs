//! The prefix tree against a model of memory: random sequences grow, are inserted, resumed, dropped
//! and squeezed.

use crate::prefix::resume_point;
use crate::radix_world::{Live, World, digests, layout, text, with_states};
use crate::{CacheSalt, PrefixKey, SequencePages};
use oscar_codec::{KvFormat, PAGE_TOKENS, Windows};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Action {
    Store { text: u64, len: usize },
    Begin { text: u64, len: usize },
    Grow { which: usize, count: usize },
    Insert { which: usize },
    End { which: usize, insert: bool },
    Reclaim { blocks: usize },
    Flush,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (0u64..16, 2usize..600).prop_map(|(text, len)| Action::Store { text, len }),
        3 => (0u64..16, 2usize..600).prop_map(|(text, len)| Action::Begin { text, len }),
        8 => (any::<usize>(), 1usize..200).prop_map(|(which, count)| Action::Grow { which, count }),
        3 => any::<usize>().prop_map(|which| Action::Insert { which }),
        2 => (any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(which, insert)| Action::End { which, insert }),
        3 => (0usize..6).prop_map(|blocks| Action::Reclaim { blocks }),
        1 => Just(Action::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn whatever_happens_every_read_is_right_and_every_page_accounted_for(
        actions in prop::collection::vec(action(), 1..60), sink in 0usize..6, recent in 1usize..150,
        blocks in 8usize..60, coded in prop::bool::weighted(0.8),
        approximates in any::<bool>(), window in prop::option::of(1usize..300), zero_width in any::<bool>(),
        states in any::<bool>(),
    ) {
        let format = if coded { KvFormat::OSCAR2 } else { KvFormat::Bf16 };
        let layout = layout(format, Windows::new(16 * sink, recent).unwrap(), zero_width, window);
        let layout = if states { with_states(layout) } else { layout };
        let mut world = World::of(layout, blocks, approximates);
        for action in actions {
            let count = world.live.len();
            match action {
                Action::Store { text: number, len } => {
                    world.begin(text(number, len));
                    let grown = world.grow(world.live.len() - 1, usize::MAX);
                    let Live { tokens, mut pages, .. } = world.live.pop().unwrap();
                    if grown {
                        world.tree.insert(&tokens, &mut pages);
                    }
                }
                Action::Begin { text: number, len } => {
                    world.begin(text(number, len));
                }
                Action::Grow { which, count: tokens } if count > 0 => {
                    world.grow(which % count, tokens);
                }
                Action::Insert { which } if count > 0 => {
                    let Live { tokens, pages, .. } = &mut world.live[which % count];
                    world.tree.insert(&*tokens, pages);
                }
                Action::End { which, insert } if count > 0 => {
                    let Live { tokens, mut pages, .. } = world.live.swap_remove(which % count);
                    if insert {
                        world.tree.insert(&tokens, &mut pages);
                        world.tree.mark_prompt(&tokens[..pages.len()]);
                    }
                }
                Action::Reclaim { blocks } => {
                    let (bytes, free) = (blocks * world.layout.unquantized_block_bytes(), world.pool.free());
                    let done = world.tree.reclaim(bytes);
                    prop_assert_eq!(world.pool.free() - free, done.bytes, "what is said is given");
                }
                Action::Flush => {
                    let possible = world.tree.reclaimable();
                    prop_assert_eq!(world.tree.flush().bytes, possible);
                    prop_assert_eq!(world.tree.reclaimable(), 0);
                }
                _ => {}
            }
            world.check_accounts();
            world.check_events();
            prop_assert_eq!(world.heard.len() * PAGE_TOKENS, world.tree.tokens());
        }
        prop_assert!(approximates || world.approximate_hits == 0);
        world.live.clear();
        world.tree.flush();
        prop_assert_eq!(world.tree.tokens(), 0);
        prop_assert_eq!(world.pool.usage().bytes, 0);
    }
}

fn stored(world: &mut World, tokens: Vec<u32>) {
    world.begin(tokens);
    let last = world.live.len() - 1;
    assert!(world.grow(last, usize::MAX));
    let Live { tokens, mut pages, .. } = world.live.pop().unwrap();
    world.tree.insert(&tokens, &mut pages);
}

#[test]
fn a_stored_sequence_is_resumed_at_its_last_page_and_after_thinning_not_in_its_middle() {
    let mut world = World::new(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), 100, false);
    let tokens = text(0, 1000);
    stored(&mut world, tokens.clone());
    assert_eq!(world.begin(tokens.clone()), resume_point(1000));
    assert_eq!(world.begin(tokens[..500].to_vec()), 448, "the middle too, while there is room for its rows");
    world.live.clear();

    // Room is needed: rows that are also held quantized go first, and the middle is no longer
    // resumable. Reading its rows quantized would change answers, and so would computing them again
    // from quantized rows.
    let spare = world.tree.pages().spare_full;
    let done = world.tree.reclaim(spare * world.layout.full_block_bytes());
    assert_eq!((done.thinned, done.evicted), (spare, 0));
    assert_eq!(world.begin(tokens.clone()), resume_point(1000), "the end is as good as before");
    assert_eq!(world.begin(tokens[..500].to_vec()), 64, "the sink is all that the middle can resume from");
    // A branch that was computed again is stored.
    let mut branch = tokens[..500].to_vec();
    branch.extend(text(0x5555, 100));
    world.live.clear();
    stored(&mut world, branch);
    let mut other = tokens[..500].to_vec();
    other.extend(text(0xaaaa, 100));
    assert_eq!(world.begin(other), 448);
}

/// A hit needs the window of the sliding layers. Under pressure windows before ends and branches stay
/// longest, and a prefix without one is found up to an earlier end.
#[test]
fn a_hit_needs_the_window_of_sliding_layers() {
    let windows = Windows::new(64, 128).unwrap();
    let mut world = World::of(layout(KvFormat::OSCAR2, windows, false, Some(200)), 100, false);
    let tokens = text(0, 1000);
    stored(&mut world, tokens.clone());
    assert_eq!(world.tree.pages().sliding, 15, "all of them, while there is room");
    assert_eq!(world.begin(tokens[..500].to_vec()), 448);
    world.live.clear();
    // Everything in no window: an end needs four pages of sliding layers and keeps one more; of the
    // full pages the sink and four before the end stay.
    let spare = 10 * world.layout.sliding_block_bytes() + 10 * world.layout.full_block_bytes();
    let done = world.tree.reclaim(spare);
    assert_eq!((done.thinned, done.evicted, world.tree.pages().sliding), (20, 0, 5));
    assert_eq!(world.begin(tokens[..500].to_vec()), 0, "no window of the sliding layers in the middle");
    assert_eq!(world.begin(tokens.clone()), 960);
    let [_, end] = &world.live[..] else { panic!("two sequences") };
    assert_eq!(end.pages.blocks().sliding, 4);
    world.live.clear();
    // The middle is computed again and stored: its window too.
    stored(&mut world, tokens[..500].to_vec());
    assert_eq!(world.begin(tokens[..500].to_vec()), 448);
    world.check_accounts();
}

#[test]
fn pages_in_use_survive_and_the_oldest_leaves_go_first() {
    let mut world = World::new(KvFormat::Bf16, Windows::default(), 40, true);
    for number in [0b00, 0b01, 0b10] {
        stored(&mut world, text(number, 193));
    }
    assert_eq!(world.begin(text(0b00, 193)), 192);
    let done = world.tree.reclaim(world.layout.full_block_bytes());
    assert_eq!((done.thinned, done.evicted), (0, 1));
    assert_eq!(world.begin(text(0b01, 193)), 128, "the least recently used lost its last page");
    assert_eq!(world.begin(text(0b10, 193)), 192);
    world.live.remove(2);
    world.live.remove(1);
    world.tree.flush();
    assert_eq!(world.tree.tokens(), 192, "what is in use stays");
    assert_eq!(world.begin(text(0b00, 193)), 192);
}

#[test]
fn idle_tails_go_before_whole_prefixes_and_used_tails_never() {
    let mut world = World::new(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), 100, true);
    let (old, new) = (text(0, 600), text(0x5555, 600));
    stored(&mut world, old.clone());
    stored(&mut world, new.clone());
    assert_eq!(world.begin(new.clone()), 576, "in use");
    let tokens = world.tree.tokens();
    // First the rows of the idle sequence that no hit is likely to need, then its tail.
    let before = world.tree.pages();
    let done = world.tree.reclaim((before.spare_full + 1) * world.layout.full_block_bytes());
    assert_eq!((done.evicted, world.tree.tokens()), (3, tokens - 128), "its recent window");
    assert_eq!(world.approximate_hits, 0);
    assert_eq!(world.begin(old.clone()), 448, "the end of the quantized blocks");
    assert_eq!(world.approximate_hits, 1);
    assert_eq!(world.tree.find_exact(&old[..599]).len(), 64);
    let last = world.live.len() - 1;
    assert!(world.grow(last, usize::MAX));
    let Live { tokens, mut pages, .. } = world.live.pop().unwrap();
    world.tree.insert(&tokens, &mut pages);
    drop(pages);
    // Rows after such a hit are marked: a longer hit on them counts as approximate too.
    let mut longer = old.clone();
    longer.extend(text(0xaaaa, 60));
    world.begin(longer);
    assert_eq!(world.approximate_hits, 2);
    world.live.clear();

    // A cold run replaces them with exact rows.
    let mut cold = SequencePages::resume(&world.layout, world.tree.find_exact(&old[..64]));
    let step = cold.prepare(&world.layout, &world.pool, 600 - cold.len()).unwrap();
    let rows = digests(&old);
    for p in step.positions.clone() {
        let page = cold.full()[p / PAGE_TOKENS].unwrap().0;
        world.memory.full.entry(page).or_insert([0; PAGE_TOKENS])[p % PAGE_TOKENS] = rows[p];
    }
    for p in step.demote.clone() {
        let page = cold.coded()[p / PAGE_TOKENS].unwrap().0;
        world.memory.coded.entry(page).or_insert([0; PAGE_TOKENS])[p % PAGE_TOKENS] = rows[p];
    }
    cold.commit(&world.layout, &step);
    world.tree.insert(&old, &mut cold);
    drop(cold);
    assert_eq!(world.begin(old), 576);
    assert_eq!(world.approximate_hits, 2, "exact again");
    world.check_accounts();
}

/// An approximate hit ends a recent window before the end: the rows of the window are computed
/// again, so that every head has them in BF16, a zero-width head too.
#[test]
fn the_recent_rows_of_an_approximate_hit_are_computed_again() {
    for zero_width in [false, true] {
        let layout = layout(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), zero_width, None);
        recent_rows_are_computed_again(&mut World::of(layout, 100, true));
    }
}

fn recent_rows_are_computed_again(world: &mut World) {
    let old = text(0, 600);
    stored(world, old.clone());
    assert_eq!((world.begin(old.clone()), world.approximate_hits), (576, 0));
    world.live.clear();
    while world.tree.find_exact(&old[..599]).len() > 64 {
        assert!(world.tree.reclaim(1).bytes > 0);
    }
    assert_eq!((world.begin(old.clone()), world.approximate_hits), (576 - 128, 1));
    let pages = &world.live[0].pages;
    assert_eq!(pages.boundary(&world.layout), 576 - 128, "everything before is read as code");
    assert!(world.grow(0, usize::MAX));
    // From here on every head has its recent rows.
    let recent = (600 - 128) / PAGE_TOKENS..;
    assert!(world.live[0].pages.full()[recent].iter().all(Option::is_some));
    // A hit that would save no more than a recent window is not worth being approximate.
    assert_eq!((world.begin(old[..200].to_vec()), world.approximate_hits), (64, 1));
    world.check_accounts();
}

/// The pages of sliding layers lie before the end, and would be gone with the tail: such a cache has
/// no approximate hits.
#[test]
fn sliding_layers_have_no_approximate_hits() {
    for (window, approximate) in [(None, 1), (Some(100), 0)] {
        let layout = layout(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), false, window);
        let mut world = World::of(layout, 100, true);
        let tokens = text(0, 600);
        stored(&mut world, tokens.clone());
        while world.tree.find_exact(&tokens).len() > 64 {
            assert!(world.tree.reclaim(1).bytes > 0);
        }
        world.begin(tokens);
        assert_eq!(world.approximate_hits, approximate, "{window:?}");
        world.check_accounts();
    }
}

/// Another tenant's prefix is invisible: not found, and found again by its owner.
#[test]
fn salts_divide_the_tree_and_leave_nothing_behind() {
    let mut world = World::new(KvFormat::OSCAR2, Windows::new(64, 128).unwrap(), 100, false);
    let tokens = text(0, 1000);
    let salts = [None, Some(CacheSalt::of(&["a"])), Some(CacheSalt::of(&["b"])), Some(CacheSalt::of(&["c"]))];
    for salt in &salts[1..3] {
        assert_eq!(world.tree.find(PrefixKey::new(*salt, &tokens)).len(), 0, "stored by another");
        world.begin(tokens.clone());
        let last = world.live.len() - 1;
        assert!(world.grow(last, usize::MAX));
        let Live { mut pages, .. } = world.live.pop().unwrap();
        assert_eq!(world.tree.insert(PrefixKey::new(*salt, &tokens), &mut pages), 960);
        world.tree.mark_prompt(PrefixKey::new(*salt, &tokens));
    }
    assert_eq!(world.begin(tokens.clone()), 0, "without a salt nothing is found either");
    world.live.clear();
    stored(&mut world, tokens.clone());
    assert_eq!(world.tree.tokens(), 3 * 960);
    world.check_events();
    assert_eq!(world.heard.len(), 15, "events tell of the unsalted prefix alone");
    for (salt, found) in salts.iter().zip([960, 960, 960, 0]) {
        assert_eq!(world.tree.find(PrefixKey::new(*salt, &tokens)).len(), found, "{salt:?}");
    }
    let mut short = SequencePages::resume(&world.layout, world.tree.find(&[][..]));
    assert_eq!(world.tree.insert(PrefixKey::new(salts[3], &tokens[..10]), &mut short), 0);
    world.tree.flush();
    assert_eq!((world.tree.tokens(), world.pool.usage().bytes), (0, 0));
    assert_eq!(world.tree.nodes.iter().flatten().count(), 1, "the root alone");
}

//! Views among the pages of the pool and in the prefix tree.

use crate::{CacheSalt, PagePool, PrefixKey, RadixCache, SequencePages, View, view_end};
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use proptest::prelude::*;
use std::sync::Arc;

fn layout() -> CacheLayout {
    CacheLayout::new(KvFormat::OSCAR2, 2, 2, 64, Windows::default(), CodeLayout::CpuTile).unwrap()
}

fn grown(layout: &CacheLayout, pool: &PagePool, len: usize) -> SequencePages {
    let mut pages = SequencePages::resumable();
    let step = pages.prepare(layout, pool, len).unwrap();
    pages.commit(layout, &step);
    pages
}

fn view(layout: &CacheLayout, pool: &PagePool, len: usize, step: usize) -> Arc<View> {
    let end = view_end(layout, len);
    let kept = (0..4).map(|head| (64..end as u32).step_by(step + head).collect()).collect();
    Arc::new(View::new(layout, pool, end, kept).unwrap())
}

fn tokens(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| i * 7 + seed).collect()
}

#[test]
fn a_view_takes_the_pages_that_its_rows_fill_and_returns_them() {
    let layout = layout();
    let pool = PagePool::new(&layout, 1 << 30);
    let page = layout.coded().unwrap().codec(0, 0).page_bytes();
    let kept = vec![(64..65).collect(), (64..128).collect(), (64..129).collect(), vec![]];
    let view = View::new(&layout, &pool, 256, kept).unwrap();
    assert_eq!((view.rows(), view.bytes(), view.pages(3).len()), (1 + 64 + 65, 4 * page, 0));
    assert_eq!((pool.usage().view_pages, pool.usage().bytes), (4, 4 * page));
    assert!((0..4).all(|h| view.pages(h).iter().all(|&id| layout.view_page_ids(1 << 30).contains(&id))));
    let small = PagePool::new(&layout, 3 * page);
    let kept = vec![(64..128).collect(); 4];
    assert!(View::new(&layout, &small, 256, kept).is_err());
    assert_eq!(small.usage().bytes, 0);
    drop(view);
    assert_eq!((pool.usage().view_pages, pool.usage().bytes), (0, 0));
}

/// Pages of one block serve several views; it is whole again when the last of them has gone.
#[test]
fn views_in_blocks_take_as_many_blocks_as_their_longest_head() {
    let layout = layout().with_views_in_blocks();
    let pool = PagePool::new(&layout, 1 << 30);
    let kept = |rows: [u32; 4]| rows.map(|rows| (64..64 + rows).collect()).to_vec();
    let first = View::new(&layout, &pool, 512, kept([1, 64, 65, 0])).unwrap();
    let used = |pool: &PagePool| (pool.usage().coded_pages, pool.usage().view_pages, pool.usage().bytes);
    let block = layout.coded_block_bytes();
    assert_eq!(used(&pool), (2, 4, 2 * block));
    let second = View::new(&layout, &pool, 512, kept([64, 64, 0, 128])).unwrap();
    assert_eq!(used(&pool), (2, 8, 2 * block), "the free pages are enough");
    let coded = pool.take(oscar_codec::BlockCounts { full: 0, coded: 1, sliding: 0, states: 0 }).unwrap();
    for head in 0..4 {
        let mut ids: Vec<u32> = first.pages(head).iter().chain(second.pages(head)).copied().collect();
        ids.push(coded.coded[0].id().0);
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all, "no page has two holders");
    }
    drop((first, coded));
    assert_eq!(used(&pool), (2, 4, 2 * block));
    drop(second);
    assert_eq!(used(&pool), (0, 0, 0));
    let small = PagePool::new(&layout, block);
    assert!(View::new(&layout, &small, 512, kept([0, 0, 65, 0])).is_err());
    assert_eq!(used(&small), (0, 0, 0));
}

#[test]
fn a_view_is_found_under_its_own_salt_alone_and_goes_with_its_node() {
    let layout = layout();
    let pool = PagePool::new(&layout, 1 << 30);
    let mut tree = RadixCache::new(layout.clone());
    let tokens = tokens(1024, 0);
    let mut base = grown(&layout, &pool, 1024);
    tree.insert(&tokens, &mut base);
    let mut seen = base.fork(&layout, 1024, Some(view(&layout, &pool, 1024, 4))).unwrap();
    let salt = Some(CacheSalt::of(&["snapkv", "1024"]));
    tree.insert(PrefixKey::new(salt, &tokens), &mut seen);
    assert!(tree.find(&tokens).view().is_none(), "a request without policy never meets a view");
    let found = tree.find(PrefixKey::new(salt, &tokens));
    assert_eq!((found.len(), found.view().map(|v| v.end())), (1024, Some(768)));
    assert!(tree.find(PrefixKey::new(Some(CacheSalt::of(&["h2o"])), &tokens)).is_empty());
    // The resumed sequence grows, is stored and found again behind the view.
    let mut next = SequencePages::resume(&layout, found);
    let step = next.prepare(&layout, &pool, 512).unwrap();
    next.commit(&layout, &step);
    let longer: Vec<u32> = tokens.iter().copied().chain(9000..9512).collect();
    tree.insert(PrefixKey::new(salt, &longer), &mut next);
    let found = tree.find(PrefixKey::new(salt, &longer));
    assert_eq!((found.len(), found.view().is_some()), (1536, true));
    drop((found, next, seen, base));
    assert_eq!(tree.reclaimable(), pool.usage().bytes);
    let freed = tree.flush();
    assert_eq!((pool.usage().bytes, pool.usage().view_pages), (0, 0), "{freed:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Thousands of random derivations, branches, inserts, reclaims and flushes: what is held is
    /// counted, and everything returns.
    #[test]
    fn accounting_closes(operations in prop::collection::vec((0u8..10, 0usize..1000), 100..500)) {
        let layout = layout();
        let pool = PagePool::new(&layout, 1 << 30);
        let mut tree = RadixCache::new(layout.clone());
        let mut held: Vec<(Option<CacheSalt>, Vec<u32>, SequencePages)> = Vec::new();
        for (what, n) in operations {
            let any = n % held.len().max(1);
            match what {
                0 => {
                    let len = 64 * (8 + n % 12);
                    held.push((None, tokens(len, n as u32 % 3), grown(&layout, &pool, len)));
                }
                1 | 2 if !held.is_empty() => {
                    let (salt, tokens, pages) = &held[any];
                    let len = pages.len();
                    if salt.is_none() && let Some(fork) = pages.fork(&layout, len, Some(view(&layout, &pool, len, 1 + n % 9))) {
                        let salt = CacheSalt::of(&[&format!("{len} {}", n % 9)]);
                        let entry = (Some(salt), tokens.clone(), fork);
                        held.push(entry);
                    }
                }
                3 if !held.is_empty() => {
                    let (salt, tokens, pages) = &mut held[any];
                    tree.insert(PrefixKey::new(*salt, tokens), pages);
                }
                4 if !held.is_empty() => {
                    let (salt, tokens, _) = &held[any];
                    let (salt, tokens) = (*salt, tokens.clone());
                    let found = tree.find(PrefixKey::new(salt, &tokens));
                    prop_assert!(salt.is_some() || found.view().is_none());
                    if found.len() == tokens.len() && (salt.is_none() || found.view().is_some()) {
                        held.push((salt, tokens, SequencePages::resume(&layout, found)));
                    }
                }
                5 if !held.is_empty() => { held.swap_remove(any); }
                6 => { tree.reclaim(n * 1000); }
                7 if n < 100 => { tree.flush(); }
                // A view under a key of its own, and sequences of several lengths that read it.
                8 if !held.is_empty() => {
                    let (salt, tokens, pages) = &held[any];
                    if salt.is_none() {
                        let key = CacheSalt::of(&["stored", &format!("{} {}", tokens[0], n % 4)]);
                        tree.store_view(key, view(&layout, &pool, 512.min(pages.len()), 1 + n % 4));
                    }
                }
                9 if !held.is_empty() => {
                    let (salt, tokens, _) = &held[any];
                    let (salt, tokens) = (*salt, tokens.clone());
                    let key = CacheSalt::of(&["stored", &format!("{} {}", tokens[0], n % 4)]);
                    let found = tree.find(PrefixKey::new(salt, &tokens));
                    let seen = tree.stored_view(key).filter(|_| salt.is_none());
                    if let Some(prefix) = seen.and_then(|view| found.reading(&layout, view)) {
                        let lineage = CacheSalt::of(&["turn", &format!("{} {}", prefix.len(), n % 4)]);
                        let tokens = tokens[..prefix.len()].to_vec();
                        held.push((Some(lineage), tokens, SequencePages::resume(&layout, prefix)));
                    }
                }
                _ => {}
            }
        }
        held.clear();
        prop_assert_eq!(tree.reclaimable(), pool.usage().bytes);
        tree.flush();
        prop_assert_eq!(pool.usage().bytes, 0);
        prop_assert_eq!(pool.usage().view_pages, 0);
    }
}

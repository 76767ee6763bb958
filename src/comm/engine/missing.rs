//! Finds the ranks on which a blocked call waits in the end. Pure: it maps reported waits to ranks without a
//! report.

use std::collections::BTreeSet;

/// Returns the ranks at which the wait chains of rank `me` end, in order. `me` itself waits for `awaited`.
///
/// The search follows the waits that ranks reported when asked (`waits`). A rank that has not answered ends a
/// chain: it is missing. If all ranks wait for each other, the result is `awaited`.
pub(super) fn missing<'a>(
    me: usize,
    awaited: &[usize],
    waits: impl Fn(usize) -> Option<&'a [usize]>,
) -> BTreeSet<usize> {
    let mut queue = awaited.to_vec();
    let (mut seen, mut missing) = (BTreeSet::from([me]), BTreeSet::new());
    while let Some(rank) = queue.pop() {
        if !seen.insert(rank) {
            continue;
        }
        match waits(rank) {
            Some(for_whom) => queue.extend(for_whom),
            None => drop(missing.insert(rank)),
        }
    }
    if missing.is_empty() {
        missing.extend(awaited);
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what rank 0 finds when it waits for `awaited`. `said` holds the reported waits by rank.
    fn found(awaited: &[usize], said: &[Option<&[usize]>]) -> Vec<usize> {
        missing(0, awaited, |rank| said[rank]).into_iter().collect()
    }

    #[test]
    fn silent_ranks_are_missing() {
        assert_eq!(found(&[1, 2], &[None, None, Some(&[0])]), [1]);
        assert_eq!(found(&[2, 1], &[None, None, None]), [1, 2]);
    }

    #[test]
    fn ranks_that_waiting_ranks_wait_for_are_missing() {
        assert_eq!(found(&[1], &[None, Some(&[2]), Some(&[3]), None]), [3]);
        assert_eq!(found(&[1], &[None, Some(&[2, 3]), None, None]), [2, 3]);
    }

    #[test]
    fn missing_rank_in_a_wait_cycle_is_the_direct_peer() {
        assert_eq!(found(&[1], &[None, Some(&[2]), Some(&[0])]), [1]);
        assert_eq!(found(&[1], &[None, Some(&[])]), [1]);
    }
}

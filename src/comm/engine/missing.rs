//! Finds the ranks that hold up a blocked call. Pure: it follows reported waits from rank to rank, up to
//! ranks that have not reported one.

use std::collections::BTreeSet;

/// Returns, in ascending order, the ranks that hold up rank `me`, which itself waits for `awaited`.
///
/// `waits` returns the ranks that a rank reported to wait for, or `None` if it has not answered. A rank that
/// has not answered is missing. If all have answered, ranks wait for each other, and the result is `awaited`.
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

    /// Returns the ranks that rank 0 finds missing when it waits for `awaited`. `said` holds the reported
    /// waits by rank; `None` for a rank that did not answer.
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

//! For whom a call waits in the end. Pure: from what ranks have said they wait for to who has not said so.

use std::collections::BTreeSet;

/// Ranks on which rank `me`, which waits for `awaited`, waits in the end; in order.
///
/// Follows whom those wait for that said so when they were asked (`waits`). One that has not answered waits
/// for nobody: it is missing. If all wait for each other, it is `awaited`.
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

    /// What rank 0 finds that waits for `awaited`; of others, by rank, for whom they said they wait.
    fn found(awaited: &[usize], said: &[Option<&[usize]>]) -> Vec<usize> {
        missing(0, awaited, |rank| said[rank]).into_iter().collect()
    }

    #[test]
    fn who_has_said_nothing_is_missing() {
        assert_eq!(found(&[1, 2], &[None, None, Some(&[0])]), [1]);
        assert_eq!(found(&[2, 1], &[None, None, None]), [1, 2]);
    }

    #[test]
    fn who_waits_for_others_is_not_missing_but_they_are() {
        assert_eq!(found(&[1], &[None, Some(&[2]), Some(&[3]), None]), [3]);
        assert_eq!(found(&[1], &[None, Some(&[2, 3]), None, None]), [2, 3]);
    }

    #[test]
    fn where_all_wait_in_a_circle_it_is_who_is_waited_for_here() {
        assert_eq!(found(&[1], &[None, Some(&[2]), Some(&[0])]), [1]);
        assert_eq!(found(&[1], &[None, Some(&[])]), [1]);
    }
}

//! Recognises messages whose receiver copies them past the caches. Pure.

use crate::collectives::kernels::uncached_message_bytes;

/// The message that a rank writes or reads in parts now, if the receiver copies it past the caches. Such a message is long.
/// A part tells only how many bytes of its message are left, which in the last parts are few.
#[derive(Debug)]
pub(super) struct LongMessage {
    /// The least number of bytes of a long message.
    least: usize,
    left: usize,
}

impl LongMessage {
    pub(super) fn of_host(ranks: usize) -> Self {
        Self { least: uncached_message_bytes(ranks), left: 0 }
    }

    /// Begins a part of a message of which `left` bytes are left.
    pub(super) fn begin_part(&mut self, left: usize) {
        if left != self.left {
            self.left = if left >= self.least { left } else { 0 };
        }
    }

    /// Returns whether the part that has begun, or ended, is of a long message.
    pub(super) fn is_long(&self) -> bool {
        self.left > 0
    }

    /// Ends a part in which `done` bytes were written or read.
    pub(super) fn end_part(&mut self, done: usize) {
        self.left = self.left.saturating_sub(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes a message of `bytes` bytes in parts of at most `part` bytes. Returns how many parts were of a long message, and
    /// how many were not.
    fn pass(message: &mut LongMessage, bytes: usize, part: usize) -> [usize; 2] {
        let (mut left, mut parts) = (bytes, [0; 2]);
        while left > 0 {
            message.begin_part(left);
            parts[usize::from(!message.is_long())] += 1;
            let done = part.min(left);
            message.end_part(done);
            left -= done;
        }
        parts
    }

    #[test]
    fn all_parts_of_a_long_message_are_copied_past_the_caches() {
        for ranks in [1, 2, 4, 125] {
            let least = uncached_message_bytes(ranks);
            let part = least / 10 + 1;
            let mut message = LongMessage::of_host(ranks);
            assert_eq!(pass(&mut message, least, part), [10, 0], "{ranks} ranks");
            assert_eq!(pass(&mut message, least - 1, part), [0, 10], "{ranks} ranks");
            assert_eq!(pass(&mut message, 3 * least, part), [30, 0], "{ranks} ranks");
            assert_eq!(pass(&mut message, 48, 40), [0, 2], "{ranks} ranks");
        }
    }

    #[test]
    fn part_in_which_nothing_was_copied_is_part_of_the_message_all_the_same() {
        let mut message = LongMessage::of_host(2);
        let bytes = uncached_message_bytes(2);
        for done in [0, bytes - 1, 0, 0, 1] {
            message.begin_part(if message.is_long() { message.left } else { bytes });
            assert!(message.is_long());
            message.end_part(done);
        }
        assert!(!message.is_long());
    }
}

//! The threads of a process that sleep in its groups, and how they are woken.
//!
//! One of them, the leader, sleeps on the epoll set of the process. The others, the followers, sleep on an
//! eventfd each. A thread that takes an event out of the epoll set wakes the thread that sleeps in the group
//! of the event. When the leader stops sleeping, it promotes a follower, which goes on sleeping as the
//! leader.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::shm::doorbells::Doorbells;

/// Wakes the thread that drives the engine of a group, if it sleeps.
pub(crate) trait Doorbell {
    fn ring(&self);
}

/// The descriptors by which the thread that sleeps in a group is woken.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The eventfd on which the thread sleeps; `None` while no thread sleeps in the group.
    bell: Mutex<Option<Arc<EventFd>>>,
    /// The doorbells of the group's shared memory, if its ranks share memory.
    pub(super) memory: OnceLock<Arc<Doorbells>>,
}

/// The value that wakes a follower: it is written to the follower's eventfd.
const WAKE: u64 = 1;
/// The value that makes a follower lead. The eventfd adds up all values written to it.
const PROMOTE: u64 = 1 << 32;

impl Slot {
    fn write(&self, value: u64) {
        if let Some(bell) = &*self.bell.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = bell.write(value);
        }
    }

    fn set(&self, bell: Option<Arc<EventFd>>) {
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = bell;
    }
}

impl Doorbell for Arc<Slot> {
    fn ring(&self) {
        self.write(WAKE);
    }
}

/// The way in which a thread sleeps.
#[derive(Debug)]
pub(crate) enum Sleep {
    /// On the epoll set of the process.
    Leader,
    Follower(Arc<EventFd>),
    /// On the epoll set, but no descriptor is left to wake this thread alone: it may sleep only briefly.
    Brief,
}

impl Sleep {
    /// Returns the eventfd on which a follower sleeps.
    pub(super) fn bell(&self) -> Option<BorrowedFd<'_>> {
        if let Self::Follower(bell) = self { Some(bell.as_fd()) } else { None }
    }
}

#[derive(Debug)]
pub(super) struct Sleepers {
    /// The eventfd in the epoll set. Other ranks write to it after they wrote to shared memory.
    doorbell: Arc<EventFd>,
    has_leader: bool,
    followers: Vec<Arc<Slot>>,
    /// Eventfds for the next followers.
    spare: Vec<Arc<EventFd>>,
}

fn eventfd() -> io::Result<Arc<EventFd>> {
    Ok(Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
}

impl Sleepers {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { doorbell: eventfd()?, has_leader: false, followers: Vec::new(), spare: Vec::new() })
    }

    pub(super) fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    pub(super) fn begin(&mut self, slot: &Arc<Slot>) -> Sleep {
        if !std::mem::replace(&mut self.has_leader, true) {
            slot.set(Some(Arc::clone(&self.doorbell)));
            return Sleep::Leader;
        }
        let Some(bell) = self.spare.pop().or_else(|| eventfd().ok()) else { return Sleep::Brief };
        slot.set(Some(Arc::clone(&bell)));
        self.followers.push(Arc::clone(slot));
        Sleep::Follower(bell)
    }

    pub(super) fn end(&mut self, slot: &Arc<Slot>, sleep: Sleep) {
        // From here on nobody writes to the eventfd, so it can be emptied and serve another thread.
        slot.set(None);
        match sleep {
            Sleep::Leader => self.has_leader = false,
            Sleep::Follower(bell) => drop(self.remove_follower(slot, bell)),
            Sleep::Brief => return,
        }
        self.promote();
    }

    /// Makes a follower lead if there is no leader.
    fn promote(&self) {
        if let Some(next) = self.followers.first().filter(|_| !self.has_leader) {
            next.write(PROMOTE);
        }
    }

    /// Takes `bell` back from a follower whose slot no longer has it. Returns whether it was rung to wake the
    /// thread.
    fn remove_follower(&mut self, slot: &Arc<Slot>, bell: Arc<EventFd>) -> bool {
        let value = bell.read().unwrap_or(0);
        self.followers.retain(|follower| !Arc::ptr_eq(follower, slot));
        self.spare.push(bell);
        !value.is_multiple_of(PROMOTE)
    }

    /// Handles the wake-up of a follower. Returns false if it has only been promoted and goes on sleeping.
    pub(super) fn is_woken(&mut self, slot: &Arc<Slot>, sleep: &mut Sleep) -> bool {
        let Sleep::Follower(bell) = sleep else { return true };
        let value = bell.read().unwrap_or(0);
        if value == 0 || !value.is_multiple_of(PROMOTE) {
            return true;
        }
        if std::mem::replace(&mut self.has_leader, true) {
            return false;
        }
        let bell = Arc::clone(bell);
        slot.set(Some(Arc::clone(&self.doorbell)));
        *sleep = Sleep::Leader;
        // Another thread may have rung the eventfd since it was read above.
        self.remove_follower(slot, bell)
    }

    /// Handles a ring of the doorbell: another rank has written to the shared memory of some group, or a
    /// thread of this process has a request for the group of the leader.
    pub(super) fn on_doorbell(&self) {
        if self.has_leader {
            // The doorbell stays readable, so that the leader wakes.
            return;
        }
        let _ = self.doorbell.read();
        let is_called =
            |follower: &&Arc<Slot>| follower.memory.get().is_some_and(|memory| !memory.is_marked_sleeping());
        self.followers.iter().filter(is_called).for_each(Doorbell::ring);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    /// Sleeps as a thread of `slot` does, until it is woken.
    fn sleep_until_woken(
        sleepers: &Mutex<Sleepers>,
        doorbell: &EventFd,
        slot: &Arc<Slot>,
        sleep: &mut Sleep,
    ) {
        loop {
            let bell = sleep.bell().unwrap_or_else(|| doorbell.as_fd());
            let mut fds = [PollFd::new(bell, PollFlags::POLLIN)];
            assert_eq!(poll(&mut fds, PollTimeout::from(5000_u16)), Ok(1), "the wake-up was lost");
            if sleepers.lock().unwrap().is_woken(slot, sleep) {
                return;
            }
        }
    }

    #[test]
    fn wake_up_during_a_promotion_is_not_lost() {
        let sleepers = Mutex::new(Sleepers::new().unwrap());
        let doorbell = Arc::clone(&sleepers.lock().unwrap().doorbell);
        let (leader, follower) = (Arc::new(Slot::default()), Arc::new(Slot::default()));
        for round in 0..10_000 {
            let leads = sleepers.lock().unwrap().begin(&leader);
            let mut sleep = sleepers.lock().unwrap().begin(&follower);
            thread::scope(|scope| {
                scope.spawn(|| sleep_until_woken(&sleepers, &doorbell, &follower, &mut sleep));
                sleepers.lock().unwrap().end(&leader, leads);
                // The rings of many rounds come at all moments of the promotion.
                (0..round % 1000).for_each(|_| std::hint::spin_loop());
                follower.ring();
            });
            let mut sleepers = sleepers.lock().unwrap();
            sleepers.end(&follower, sleep);
            sleepers.on_doorbell();
        }
    }
}
